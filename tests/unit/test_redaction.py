"""No message tells a password of a URL, in whatever form it is given, and none acts on a terminal or a log."""

import logging
import traceback
import warnings

import pytest

from scheduler.core.errors import StoreError
from scheduler.core.records import Failure, Key
from scheduler.core.text import encodable, one_line, printable, redacted, shown_url, warn_safely
from scheduler.inspect import doctor
from scheduler.store.store import Store

SECRET = "hunter2x"
URLS = [
    f"postgresql://u:{SECRET}@h:5432/db",
    f"postgresql://u@h/db?password={SECRET}",
    f"postgresql://u:{SECRET}@h:abc/db",
    f"postgresql://u:{SECRET}@[::1/db",
    f"postgresql:/u:{SECRET}@h/db",
    f"postgresql:u:{SECRET}@h",
    f"sqlite://user:{SECRET}@",
    f"sqlite://user:{SECRET}@h/f.db",
    f"sqlite:////nowhere/x.db?key={SECRET}",
    f"postgresql://{SECRET}@h/db",
    "postgresql://u:%68unter2x@h/db",
    f"postgresql://u:p@{SECRET}@h/db",
    f"postgresql://u:p/{SECRET}@h/db",
    f"postgresql://u:p?{SECRET}@h/db",
    f"postgresql://u:p#{SECRET}@h/db",
    f"postgresql://u:my {SECRET}@h/db",
    f"postgresql://u:my\n{SECRET}@h/db",
    f"POSTGRESQL://u:{SECRET}@h/db",
    f" postgresql://u:{SECRET}@h/db",
    f"postgresql://u:{SECRET}@h1:1,h2:2/db",
    f"postgresql://h/db?sslpassword={SECRET}&sslmode=require",
    f"postgresql://h/db?passfile={SECRET}",
    f"postgresql://h/db?connect_timeout={SECRET}@",
    f"postgresql://h/db?host=/tmp/x&token={SECRET}",
    f"postgresql://h/db;password={SECRET}",
    f"postgresql://h/{SECRET}@x",
    f"postgresql+psycopg2://u:{SECRET}@h/db",
    f"jdbc:postgresql://h/db?user=u&password={SECRET}",
    f"mysql+pymysql://u:{SECRET}@h/db",
    f"u:{SECRET}@h:5432/db",
    f"host=h user=u password={SECRET} dbname=x",
    f"host=h user=u password='{SECRET} and more' dbname=x",
    f"://u:{SECRET}@h/db",
]


@pytest.mark.parametrize("url", URLS)
def test_no_password_is_told_whatever_the_url(url, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert SECRET not in shown_url(url)
    assert SECRET not in redacted(f'cannot parse "{url}": {url.partition(":")[2]!r}', url)
    said = []
    try:
        store = Store(url)
        said.append(store.location)
        list(store.records())
        store.close()
    except StoreError as error:
        said += [str(error), *traceback.format_exception(error)]
        while error is not None:  # what a debugger or a service for errors shows of it
            said.append(f"{error!r} {error}")
            error = error.__cause__ or error.__context__
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", url)
    monkeypatch.setattr(doctor, "shipped", lambda: None)
    said += [found.detail for found in doctor._caches()]
    assert not [line for line in said if SECRET in line]


def test_what_is_no_secret_is_told():
    for url in (
        "postgresql://h:5432/db",
        "postgresql://[::1]:5432/db",
        "sqlite:////tmp/a.db",
        "/home/me/cache.db",
        "sqlite:///:memory:",
    ):
        assert shown_url(url) == url
    assert shown_url("postgresql://me:x@h/db?host=/run/pg") == "postgresql://me:***@h/db?***"
    assert redacted("see https://docs.jax.dev/a/b and tokens=4") == "see https://docs.jax.dev/a/b and tokens=4"
    assert redacted("sslpassword=abc def, PGPASSWORD: 'x y' end") == "sslpassword=*** def, PGPASSWORD: *** end"


HOSTILE = [
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "\u202eabc",
    "\u2066abc\u2069",
    "a\u200bb\ufeff",
    "\ud800",
    "\r",
    "\u2028",
    "\x85",
    "\u3164",
    "\x7f",
    "\x00",
    "\U000e0041",
    "\u061c",
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_text_of_others_acts_on_nothing(text, caplog):
    key = Key(f"op{text}", f"chip{text}", '{"n":1}')
    forged = f"{text}\nWARNING forged"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warn_safely(forged)
    with caplog.at_level(logging.DEBUG, "scheduler"):
        logging.getLogger("scheduler").warning("%s: %s", key, forged)
    told = [str(key), str(StoreError(text)), printable(text), str(warned[0].message), caplog.messages[0]]
    for line in told:
        assert text not in line
        assert all(c.isprintable() for c in line)
        line.encode()
    assert one_line("tab\tend\n") == "tab\\tend\\n"


def test_letters_of_all_languages_stay():
    text = "größer 漢字 العربية हिन्दी e\u0301 \u00a0\t\n\U0001f600"
    assert printable(text) == text


def test_what_a_candidate_raised_can_be_stored():
    assert Failure("lower", "bad \ud800 \x00 é").detail == "bad \\ud800 \\x00 é"
    assert encodable("é\U0001f600") == "é\U0001f600"
