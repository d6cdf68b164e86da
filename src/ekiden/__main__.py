"""`python -m ekiden`: the command line, if its script is not on the path."""

from ekiden.cli.app import main

if __name__ == "__main__":
    main()
