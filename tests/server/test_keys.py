"""Keys in a folder: made, rotated, revoked and expired, and what becomes of a file that is not as it was written."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from quarrel.errors import ConfigError, RequestError
from quarrel.server import keys
from quarrel.server.keys import Key, Keyring


def held(ring: Keyring) -> list[Key]:
    return [*ring.keys()]


def test_a_key_ends_when_it_is_revoked_rotated_or_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Keyring(tmp_path)
    key, secret = ring.create("a")
    new, fresh = ring.rotate(key.id)
    assert (ring.find(secret), ring.find(fresh)) == (None, new)
    ring.revoke(new.id)
    assert ring.find(fresh) is None
    _, brief = ring.create("b", expires_in=60.0)
    assert ring.find(brief) is not None
    later = time.time() + 61
    monkeypatch.setattr(keys.time, "time", lambda: later)
    assert ring.find(brief) is None
    assert secret not in ring.path.read_text()
    assert ring.path.stat().st_mode & 0o077 == 0


def test_a_rotated_key_does_not_outlive_its_own_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Keyring(tmp_path)
    key, secret = ring.create("a", expires_in=60.0)
    began = time.time()
    ring.rotate(key.id, overlap=3600.0)
    assert ring.find(secret) is not None
    monkeypatch.setattr(time, "time", lambda: began + 61.0)
    assert ring.find(secret) is None
    _, secret = ring.rotate(key.id, overlap=3600.0)  # nor does one come back that has ended
    assert not any(each.usable(time.time()) for each in list(ring.keys()))
    assert ring.find(secret) is None


def test_a_new_key_is_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    folder = tmp_path / "made" / "here"
    ring = Keyring(folder)
    assert ring.keys() == ()
    key, secret = ring.create("laptop")
    assert re.fullmatch(r"qk-[\w-]{43}", secret)
    assert re.fullmatch("[0-9a-f]{8}", key.id)
    assert (key.name, key.created, key.expires, key.revoked) == ("laptop", 1000.0, None, False)
    brief, _ = ring.create("x" * 64, expires_in=60.0)
    assert brief.expires == 1060.0
    assert ring.keys() == Keyring(folder).keys() == (key, brief)
    assert ring.find(secret) == key
    assert ring.find(secret[:-1]) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.name: p.stat().st_mode & 0o777 for p in folder.iterdir()} == {"keys.json": 0o600, "keys.made": 0o600}
    for name in ("", "x" * 65, "two\nlines"):
        with pytest.raises(RequestError, match="a key's name is .*, wanted 1 to 64 printable characters"):
            ring.create(name)
    for call in (ring.revoke, ring.rotate):
        with pytest.raises(RequestError, match="there is no API key 'nobody'"):
            call("nobody")


def test_a_key_is_good_until_the_second_in_which_it_ends() -> None:
    key = Key("a", "a", "", 0.0, expires=10.0)
    assert [key.usable(now) for now in (9.9, 10.0)] == [True, False]
    assert not Key("a", "a", "", 0.0, revoked=True).usable(0.0)


def test_changing_one_key_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    ring = Keyring(tmp_path)
    secrets = {name: ring.create(name)[1] for name in "abc"}
    ids = {k.name: k.id for k in held(ring)}
    assert ring.revoke(ids["a"]).revoked
    new, fresh = ring.rotate(ids["b"], overlap=30.0)
    assert (new.name, new.expires) == ("b", None)
    assert [k.expires for k in held(ring)] == [None, 1030.0, None, None]
    assert [ring.find(s) is not None for s in (*secrets.values(), fresh)] == [False, True, True, True]
    # Another process sees the change at once, and its own changes keep this one's.
    other = Keyring(tmp_path)
    other.revoke(ids["c"])
    assert [ring.find(s) is not None for s in (*secrets.values(), fresh)] == [False, True, False, True]
    assert len(list(tmp_path.iterdir())) == 2
    ring.create("d", expires_in=60.0)
    short, _ = ring.rotate(ring.keys()[-1].id)
    assert short.expires == 1060.0


def test_a_file_is_read_again_only_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Keyring(tmp_path)
    _, secret = ring.create("a")
    reads: list[Path] = []
    read = Path.read_text

    def counted(path: Path, *rest: str) -> str:
        reads.append(path)
        return read(path, *rest)

    monkeypatch.setattr(Path, "read_text", counted)
    for _ in range(3):
        assert ring.find(secret)
    assert len(reads) == 1
    Keyring(tmp_path).create("b")
    assert len(ring.keys()) == 2


def test_what_fails_while_it_is_written_leaves_the_keys_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Keyring(tmp_path)
    _, secret = ring.create("a")
    synced: list[int] = []
    monkeypatch.setattr(keys.os, "fsync", synced.append)
    ring.create("b")
    assert synced  # before the new file takes the old one's place

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        ring.create("c")
    assert {p.name for p in tmp_path.iterdir()} == {"keys.json", "keys.made"}
    assert [k.name for k in held(ring)] == ["a", "b"]
    assert ring.find(secret)


KEY = {"id": "a", "name": "a", "hash": "0" * 64, "created": 0.0, "expires": None, "revoked": False}
WRONG = [{"id": 5}, {"name": None}, {"hash": 5}, {"hash": "\u00e9"}, {"created": "x"}, {"expires": "x"}, {"revoked": 0}]


def test_a_file_that_is_no_list_of_keys_is_never_no_keys(tmp_path: Path) -> None:
    ring = Keyring(tmp_path, ["given"])
    (tmp_path / "keys.json").write_text(json.dumps([KEY, {**KEY, "expires": 5}]))
    assert [k.id for k in held(ring)] == ["a", "a", "given"]
    for text in ("", "[]", "{}", "null", '["a"]', "[" * 99_999, *(json.dumps([KEY, {**KEY, **w}]) for w in WRONG)):
        (tmp_path / "keys.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a list of API keys .*: repair or remove it"):
            ring.keys()
    (tmp_path / "keys.json").unlink()
    (tmp_path / "keys.json").mkdir()
    with pytest.raises(ConfigError, match="is not a list of API keys"):
        ring.keys()


def test_a_file_that_has_gone_opens_nothing(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.create("a")
    ring.keys()
    (tmp_path / "keys.json").unlink()
    (tmp_path / "keys.made").unlink()
    with pytest.raises(ConfigError, match="has gone"):  # it knows that there were some
        ring.keys()
    assert Keyring(tmp_path).keys() == ()
    (tmp_path / "keys.made").touch()
    with pytest.raises(ConfigError, match="has gone"):
        Keyring(tmp_path).keys()
    assert [k.id for k in held(Keyring(tmp_path, ["secret"]))] == ["given"]
    several = Keyring(tmp_path, ["one", "two", "three"])
    assert [k.id for k in held(several)] == ["given", "given 2", "given 3"]  # each with limits of its own
    assert [k and k.name for k in map(several.find, ("three", "one", "four"))] == ["given 3", "given", None]
    (tmp_path / "keys.made").unlink()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the API keys cannot be read \(Not a directory\)"):
        Keyring(tmp_path / "file").keys()
