"""Mathematics and outer loops that several papers share."""
