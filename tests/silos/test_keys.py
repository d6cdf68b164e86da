"""Keys: kept private, and given by name."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.methods import FedSeq
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust import keys
from tests.silos.fakes import FakeNodes
from tests.silos.sessions import far
from tests.silos.signed import federation


@pytest.mark.skipif(os.name != "posix", reason="other systems have other rights")
def test_a_key_that_other_users_can_read_is_not_used(tmp_path: Path) -> None:
    private = tmp_path / "a.key"
    keys.generate(private)
    assert keys.sign(private, "hello", b"text")
    for mode in (0o640, 0o604, 0o620):
        private.chmod(mode)
        for use in (keys.public_of, lambda file: keys.sign(file, "hello", b"text")):
            with pytest.raises(
                UserError, match=r"other users of this machine can read the silo's key: chmod 600"
            ):
                use(private)


def shut(path: Path) -> SiloFile:
    """What a file says now, of a silo that trusts the others as those of `federation` do."""
    from ekiden.silos.silo.silo_file import read

    file = read(path)
    return replace(file, limits=replace(file.limits, level="all"))


def test_another_key_of_a_silo_than_was_given_is_refused(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    far(FedSeq(epochs=1), nodes, tmp_path / "run", public)
    (tmp_path / "client-1.key").unlink()
    public["client-1"] = keys.read_public(keys.generate(tmp_path / "client-1.key"))
    with pytest.raises(
        UserError,
        match=r"silo client-0: the run says that client-1 has the key SHA256:\S+, client-0 knows",
    ):
        far(FedSeq(epochs=1), nodes, tmp_path / "other", public)
    (tmp_path / "peers" / "client-1.pub").write_text(public["client-1"])
    assert far(FedSeq(epochs=1), nodes, tmp_path / "third", public).weights is not None
    given = tmp_path / "client-0.toml"
    given.write_text(given.read_text().replace('"peers"', '"nowhere"'))
    with pytest.raises(UserError, match=r"there is no public key .*nowhere/client-1.pub"):
        far(
            FedSeq(epochs=1),
            FakeNodes([shut(given), *list(nodes.files.values())[1:]]),
            tmp_path / "fourth",
            public,
        )
