# SPDX-License-Identifier: Apache-2.0
"""Sources of the token files of each split, and data options that contradict each other."""

from __future__ import annotations

import json

import pytest

from megatron.cli.tokenizers import HuggingFaceTokenizer
from megatron.core.datasets import DataPath, IndexedDataset
from megatron.training.config import DataConfig
from megatron.training.data.data_paths import SplitPath, prefixes, problems, read_paths
from megatron.training.data.vocabulary import describe_files
from tests.unit_tests.training.small_config import small_config


def test_one_data_path_is_split_three_ways():
    config = DataConfig(data_path=("1", "a", "3", "b"))
    path = DataPath(("a", "b"), (1.0, 3.0))
    assert read_paths(config) == {
        name: SplitPath(path=path, split_index=i)
        for i, name in enumerate(("train", "valid", "test"))
    }
    assert prefixes(config) == ("a", "b")


def test_data_args_file_holds_the_data_path_arguments(tmp_path):
    (tmp_path / "words").write_text("0.3 'a b'\n0.7 c\n")
    paths = read_paths(DataConfig(data_args_path=str(tmp_path / "words")))
    assert paths["train"].path == DataPath(("a b", "c"), (0.3, 0.7))
    with pytest.raises(ValueError, match=r"--data-args-path .*absent cannot be read"):
        read_paths(DataConfig(data_args_path=str(tmp_path / "absent")))
    (tmp_path / "words").write_text("1 a b")
    with pytest.raises(ValueError, match="--data-args-path: data path '1 a b': give PREFIX"):
        read_paths(DataConfig(data_args_path=str(tmp_path / "words")))


def test_each_split_can_have_its_own_paths(tmp_path):
    expected = {
        "train": SplitPath(path=DataPath(("a", "b"), (1.0, 2.0))),
        "valid": SplitPath(path=DataPath(("c", "a"), None)),
    }
    config = DataConfig(train_data_path=("1", "a", "2", "b"), valid_data_path=("c", "a"))
    assert read_paths(config) == expected
    assert prefixes(config) == ("a", "b", "c")
    path = tmp_path / "paths.json"
    path.write_text(json.dumps({"train": [1, "a", 2, "b"], "valid": ["c", "a"], "test": None}))
    assert read_paths(DataConfig(per_split_data_args_path=str(path))) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "paths.json:1: not JSON"),
        ("[]", "must contain"),
        ('{"valid": ["a"]}', "must contain"),
        ('{"train": ["a"], "dev": ["b"]}', "must contain"),
        ('{"train": "a"}', "train must be a list"),
        ('{"train": [["a"]]}', "train must be a list"),
        ('{"train": ["a", 1]}', "the data path of train: data path 'a 1'"),
    ],
)
def test_invalid_per_split_paths_file_is_refused(tmp_path, text, message):
    path = tmp_path / "paths.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_paths(DataConfig(per_split_data_args_path=str(path)))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("", "no data: give --data-path, --train-data-path or --mock-data"),
        ("--data-path a --mock-data", "--data-path and --mock-data are mutually exclusive"),
        ("--train-data-path a --data-args-path b", "are mutually exclusive: keep one"),
        ("--data-path a --valid-data-path b", "--valid-data-path needs --train-data-path"),
        ("--train-data-path 1 a 2", "--train-data-path '1 a 2': give PREFIX"),
        ("--data-path 1 b x d", "--data-path '1 b x d': give PREFIX"),
        ("--data-path a --split 9,x", "--split '9,x': give up to three numbers"),
        ("--data-path a --split 0,0", "--split '0,0': give up to three numbers"),
        ("--data-path a --sft --allow-chat-as-text", "--allow-chat-as-text has no effect"),
        ("--mock-data --sft", "--mock-data has no conversations"),
        ("--data-path a --sft --reset-position-ids", "--reset-position-ids has no effect"),
        (
            "--data-path 1 x/my.jsonl --sft",
            "--data-path x/my.jsonl is text, not token files: run python -m "
            "megatron.training.preprocess_data --chat --input x/my.jsonl --output-prefix x/my",
        ),
        ("--data-path a.txt", "preprocess_data --input a.txt --output-prefix a "),
    ],
)
def test_contradicting_data_paths_are_reported(flags, problem):
    config = small_config(flags, without=("--data-path",))
    (reported,) = problems(config.data)
    assert problem in reported


def test_mock_data_needs_no_path():
    assert list(problems(DataConfig(mock_data=True))) == []
    assert prefixes(DataConfig(mock_data=True)) == ()


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_impossible_file_names_are_user_errors(name):
    for open_path in (HuggingFaceTokenizer, IndexedDataset):
        with pytest.raises(ValueError, match=name[:1]):
            open_path(name)
    assert describe_files(name) == {}
