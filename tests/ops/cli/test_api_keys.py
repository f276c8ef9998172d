"""The key of a server: given by an option, a variable or a file, or drawn."""

import pytest

from probemon.errors import ConfigError
from probemon.ops.cli.api_keys import api_key_of, api_keys_of
from probemon.ops.server.keys import Key

KEY = "a-key-of-16-or-more"


def test_key_is_the_one_that_is_given_else_a_new_one_each_time(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert api_key_of(KEY, None, no_token=False) == api_key_of("", file, no_token=False) == (KEY, False)
    assert api_key_of("", None, no_token=True) == (None, False)
    (first, is_drawn), (second, _) = (api_key_of("", None, no_token=False) for _ in range(2))
    assert is_drawn and first != second and len(first) >= 40


@pytest.mark.parametrize("key", ["short", "with a space in the middle", "a-key-with-ümlauts-in-it", "x" * 20 + "\n\ny"])
def test_what_a_header_cannot_hold_is_refused(tmp_path, key):
    (tmp_path / "key").write_text(key)
    for given in ((key, None), ("", tmp_path / "key")):
        with pytest.raises(ConfigError, match=r"the API key has|key, line [13]: "):
            api_key_of(*given, no_token=False)


def test_file_of_keys_with_roles_is_for_a_server_that_has_roles(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"\ufeffalice {KEY} ask\r\n")  # as some editors write it
    assert api_keys_of("", file, no_token=False) == ((Key(KEY, "alice", frozenset({"ask"})),), False)
    with pytest.raises(ConfigError, match="has keys with roles"):
        api_key_of("", file, no_token=False)


def test_two_keys_or_no_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--api-key \(or PROBEMON_API_KEY\) and --no-token are given"):
        api_key_of(KEY, None, no_token=True)
    with pytest.raises(ConfigError, match="cannot be read as a key"):
        api_key_of("", tmp_path / "none", no_token=False)
