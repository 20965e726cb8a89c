"""What a tuning file says when it is read, and which files are refused, with what words."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cufa
from cufa.errors import ArgumentError, DeviceError, DTypeError
from cufa.gpu import config, tuning
from cufa.gpu.config import Config, Tuned, _Row
from cufa.gpu.device import Device
from cufa.tools.race import key_of, row_of
from cufa.tools.workloads import workload

CARD = Device.of_arch(90)
TILES = [Config(64, 64, 128, 1, 1), Config(64, 32, 128, 1, 2)]


def test_rows_have_the_columns_of_the_table():
    assert tuple(tuning._COLUMNS) == _Row._fields


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a file that is in order."""
    key = key_of(workload(64, 64), CARD, "fa2")
    path = tmp_path_factory.mktemp("tuning") / "t.json"
    tuning.write(path, CARD, [row_of(key, TILES[0], 512), row_of(key, TILES[1])], [[], []])
    return json.loads(path.read_text())


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The content with another value in one place."""
    content = copy.deepcopy(content)
    inner = content
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return content


def read(tmp_path: Path, content: Any, cards: list[str]) -> Tuned:
    """What a file with this content gives on a machine with these cards."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content))
    return tuning.read(path, cards)


def test_what_is_written_is_what_is_read(tmp_path, content):
    found = read(tmp_path, content, [CARD.name])
    key = key_of(workload(64, 64), CARD, "fa2")
    assert found.rows == (row_of(key, TILES[0], 512), row_of(key, TILES[1]))
    assert found.devices[0] == CARD.name


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("format",), 2, "does not say that it is a tuning file of format 1"),
        (("cufa",), "0.0.1", f"is for cufa 0.0.1, and this is {cufa.__version__}"),
        (("kernels", "fa2_fwd"), "0" * 32, "was measured with another fa2_fwd"),
        (("rows", 1, "kernel"), "fa9", "has 'fa9' in row 1, kernel; it must be one of"),
        (("rows", 0, "config", "threads"), 0, "has 0 in row 0, config, threads"),
        (("rows", 0, "config", "warps"), 4, "has in row 0, config other columns than block_m"),
        (("rows", 0, "causal"), 1, "has 1 in row 0, causal"),
        (("rows", 0, "arch"), 80, "is for sm_90, but its row 0 for sm_80"),
        (("rows",), {}, "has no list of rows"),
        (("arch",), None, "has arch None; it must be of type int"),
    ],
)
def test_a_file_that_is_stale_or_malformed_is_refused(tmp_path, content, place, value, said):
    before = config.tuned
    with pytest.raises(ArgumentError, match=re.escape(said)) as error:
        read(tmp_path, changed(content, place, value), [CARD.name])
    assert str(tmp_path) in str(error.value)
    assert config.tuned is before


def test_a_file_for_another_card_is_refused(tmp_path, content):
    with pytest.raises(DeviceError, match=r"is for sm_90, and this machine has NVIDIA A100"):
        read(tmp_path, content, ["NVIDIA A100 (sm_80)"])


def test_without_a_card_a_file_is_for_whoever_compiles_ahead(tmp_path, content):
    assert read(tmp_path, content, []).rows


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"nothing\.json cannot be read"):
        cufa.load_tuning(tmp_path / "nothing.json")


@pytest.mark.parametrize("file", [3, 1.5, ["x"]])
def test_what_is_no_path_is_refused(file):
    with pytest.raises(DTypeError, match=rf"file is {re.escape(repr(file))}, a .*path"):
        cufa.load_tuning(file)


def test_json_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ArgumentError, match=r"deep\.json cannot be read as JSON"):
        cufa.load_tuning(tmp_path / "deep.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(data=st.data(), value=JSON)
def test_no_content_raises_anything_else(tmp_path_factory, content, data, value):
    rows = st.tuples(st.just("rows"), st.sampled_from([0, 1]), st.sampled_from(_Row._fields))
    place = data.draw(st.sampled_from(sorted(content)).map(lambda name: (name,)) | rows)
    whole = data.draw(st.booleans())
    folder = tmp_path_factory.getbasetemp()
    given = value if whole else changed(content, place, value)
    assert isinstance(outcome(folder, given), (Tuned, ArgumentError, DeviceError))


def outcome(folder: Path, content: Any) -> Any:
    """What reading gives or raises."""
    try:
        return read(folder, content, [CARD.name])
    except Exception as error:
        return error
