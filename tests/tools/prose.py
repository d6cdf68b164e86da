"""Find words that make our prose hard to read: `python -m tests.tools.prose`, part of `make lint`.

PyPI's package of Vale downloads a program at its first run, and Proselint takes no word list of a
project's own. So this is a list of our own bad habits and nothing else."""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    "*.md",
    "docs/**/*.md",
    "experiments/*.toml",
    "src/**/*.py",
    "benchmarks/**/*.py",
    "tests/**/*.py",
)
EXCEPT = ("tests/tools/prose.py", "tests/tools/test_prose.py")  # the words themselves
HISTORY = ("CHANGELOG.md",)
INSTEAD = {
    r"(?<!here\s)\b(?:is|are|was) no "
    r"(?!longer|more|less|better|worse)": "is not a ..., or: there is no ...",
    r"\bbesides?\b": "next to, also",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\banew\b": "again",
    r"\bif (?:so wished|wished|asked for)\b": "if you ask for it, or the option's name",
    r", say(?=[.;:)\"]|\s*$)": "for example",
    r"\bone's own\b": "the client's own, your own",
    r"\bat hand\b": "available",
    r"\bwill do\b": "works, is enough",
    r"\bbut for\b": "except for",
    r"\bweighed\b": "weighted",
    r"\bhence\b": "so",
    r"\b(?:there|where|here)(?:by|of|in|upon)\b": "so, in it, of it",
    r"\b(?:upon|whilst|amongst|ought|shall)\b": "on, while, among, should, must",
    r"\b(?:without|for want of) which\b": "a new sentence",
    r"\bwhat it is at\b": "what it is doing",
    r"\bnext of kin\b": "the closest relative",
    r"\blikewise\b": "the same for ..., also",
    r"\bin vain\b": "for nothing, lost",
    r"\bexcepted\b": "except ...",
    r"\bas good as none\b": "ignored",
    r"\bat a stretch\b": "in one go, or: in one training",
    r"\bput right\b": "fix",
    r"\b(?:say|says|said|tell|tells|told) of\b": "say about, report",
    r"\bless (?:the|their|its)\b": "minus",
    r"\bin silence\b": "silently",
    r"\b(?:to|can|could) be had\b": "available",
    r"\bmade less\b": "reduced",
    r"\b(?:one|two) (?:round|hop|step)s? a (?:round|hop|step)\b": "Yield the state after each ...",
    r"\b(?:is|are|was) told of\b": "hears of, is reported",
    r"\bas where\b": "as in",
    r"\bin mid-": "during",
    r"\bin the place of\b": "in place of",
    r"\bnone of this\b": "not of this",
    r"\bas many as\b": "at most, one for each, the number of",
    r"\b(?:and|or) no (?:run folder|safetensors)": "not a ...",
}
IN_PAGES = {  # what users read must be better still
    r"\b(?:is|are|was|were) of (?:the|a|an|its|their)\b": "belongs to, comes from, shows",
    r"\bin the mean\b": "on average",
    r"\bin the same bytes\b": "with the same traffic",
    r"\b(?:can|cannot|could) be told\b": "can be decided, can be distinguished",
    r"\bthe (?:former|latter)\b": "the noun itself",
    r"\bclaimed to be new\b": "We claim no novelty",
    r"\b(?:has|have|had) \d+\.\d": "reaches, with a unit",
    r"\b(?:is|are) away\b": "is missing",
    r"\bof such\b": "of these, of this kind",
    r"\bin small\b": "at small scale",
    r"\bwhoever\b": "a person who, a party that",
    r"\bby itself\b": "automatically, on its own",
}
GAP = r"[\s#]+"  # a phrase may run over the end of a line, and of a line of comment
Rules = list[tuple[re.Pattern[str], str]]


def _rules(words: dict[str, str]) -> Rules:
    return [
        (re.compile(bad.replace(" ", GAP), re.IGNORECASE), instead)
        for bad, instead in words.items()
    ]


RULES = _rules(INSTEAD)
PAGE_RULES = RULES + _rules(IN_PAGES)


def findings(text: str, rules: Rules = RULES) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the words, and what to write instead, for each bad habit; code in backticks
    is skipped."""
    prose = re.sub(
        r"```.*?```|<!--.*?-->|(?<=\])\([^)]*\)|`[^`\n]+`|\{[^{}\n]*\}|\"\w+\"",
        lambda code: re.sub(r"[^\n]", "_", code.group()),
        text,
        flags=re.DOTALL,
    )
    for rule, instead in rules:
        for match in rule.finditer(prose):
            yield (
                text.count("\n", 0, match.start()) + 1,
                re.sub(GAP, " ", match.group()).strip(),
                instead,
            )


def in_file(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the findings in a page, or in the comments and strings of a Python file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from findings(
            text, PAGE_RULES if path.suffix == ".md" and path.name not in HISTORY else RULES
        )
        return
    lines = text.split("\n")
    prose = [[" "] * len(line) for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT and "STRING" not in tokenize.tok_name[token.type]:
            continue
        for row in range(token.start[0], token.end[0] + 1):
            left = token.start[1] if row == token.start[0] else 0
            right = token.end[1] if row == token.end[0] else len(lines[row - 1])
            prose[row - 1][left:right] = lines[row - 1][left:right]
    yield from findings("\n".join("".join(line).rstrip() for line in prose))


def main() -> int:
    """Print every finding of the repository as FILE:LINE; 1 if there is any."""
    left_out = {path for pattern in EXCEPT for path in ROOT.glob(pattern)}
    paths = sorted({path for pattern in FILES for path in ROOT.glob(pattern)} - left_out)
    found = [(path.relative_to(ROOT), *finding) for path in paths for finding in in_file(path)]
    for path, line, words, instead in found:
        print(f'{path}:{line}: "{words}" (write: {instead})')
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
