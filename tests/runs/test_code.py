"""Functions from files: how they are named, what they are given, and what goes wrong."""

import pytest

from aqg.errors import ConfigError
from aqg.spec import Code, file_digest, load_file

SOURCE = r"""
from dataclasses import dataclass

@dataclass
class Made:
    shape: tuple
    width: int

def make(input_shape, width=3):
    return Made(input_shape, width)

def everything(**given):
    return given

def needy(colour):
    return colour

def failing():
    raise KeyError("no\nsuch thing")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


def test_a_function_gets_what_it_asks_for(file):
    code = Code.parse(f"{file}:make:width=7")
    made = code.call(input_shape=(2, 3), num_classes=4)
    assert (made.shape, made.width) == ((2, 3), 7)
    assert Code.parse(f"{file}:everything").call(a=1, b=2) == {"a": 1, "b": 2}
    assert Code.parse(str(code)) == code
    assert code.short == "own.py:make:width=7"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (":nothing", "has no function 'nothing'"),
        (":make:depth=2", r"make\(\) in .* has no option 'depth'; it has: width"),
        (":needy", "needs an argument 'colour'; what it can ask for by name is input_shape"),
        (":failing", r"failing\(\) in .* failed: KeyError: 'no\\nsuch thing'"),
        ("", "write FILE.py:FUNCTION"),
        (":make:width", "write FILE.py:FUNCTION"),
        (":2x", "write FILE.py:FUNCTION"),
    ],
)
def test_what_goes_wrong_is_one_line(file, rest, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Code.parse(f"{file}{rest}").call(input_shape=(2,))
    assert "\n" not in str(caught.value)


def test_a_file_that_fails_is_named(tmp_path):
    for source, message in {
        None: "own.py' cannot be read: No such file",
        "def f(:\n": "own.py' cannot be run: SyntaxError",
        "import nothing_of_this_name\n": "No module named 'nothing_of_this_name'",
    }.items():
        if source is not None:
            (tmp_path / "own.py").write_text(source)
        with pytest.raises(ConfigError, match=message):
            load_file(tmp_path / "own.py")


def test_a_changed_file_is_another_file(file):
    before, digest = load_file(file), file_digest(file)
    assert load_file(file) is before
    file.write_text(SOURCE + "\nlater = 1\n")
    assert file_digest(file) != digest
    assert load_file(file).later == 1


def test_the_files_of_a_folder_import_each_other(tmp_path):
    (tmp_path / "helper_of_own.py").write_text("VALUE = 5\n")
    (tmp_path / "main.py").write_text(
        "from helper_of_own import VALUE\ndef f():\n    return VALUE\n"
    )
    assert Code.parse(f"{tmp_path}/main.py:f").call() == 5
