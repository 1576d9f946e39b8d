from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.observe import models
from kvwatch.observe.models import CONFIG_LIMIT, ModelSource
from kvwatch.observe.records import Failure, Launch, ModelConfig, Process
from tests.observe.fake_proc import FakeProc

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_scaling": {"a": 1, "b": 2},
    "text_config": {"x": 1, "y": 2},
}


def launch(model: str | None, **more: Any) -> Launch:
    defaults: dict[str, Any] = {
        "pid": None,
        "start_time": None,
        "flags": Flags(),
        "served_names": (),
        "base_url": None,
    }
    return Launch(model=model, **{**defaults, **more})


def make_model(folder: Path, config: Mapping[str, Any] = CONFIG, **files: int) -> Path:
    """A model directory; ``files`` are sizes by name, with ``__`` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, size in files.items():
        (folder / name.replace("__", ".")).write_bytes(b"\0" * size)
    return folder


def make_snapshot(hub: Path, name: str, commit: str, *, ref: str | None = "main") -> Path:
    """A model in a hub cache, laid out as the hub's client does: snapshots link to blobs."""
    repository = hub / f"models--{name.replace('/', '--')}"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / commit
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    (blobs / f"c{commit}").write_text(json.dumps({**CONFIG, "commit": commit}))
    (blobs / f"w{commit}").write_bytes(b"\0" * 100)
    (snapshot / "config.json").symlink_to(f"../../blobs/c{commit}")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/w{commit}")
    if ref is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def read(launched: Launch, **more: Any) -> ModelConfig:
    found = ModelSource().read(launched, **more)
    assert isinstance(found, ModelConfig), found
    return found


def refuse(launched: Launch, **more: Any) -> Failure:
    found = ModelSource().read(launched, **more)
    assert isinstance(found, Failure), found
    assert found.source == "models"
    return found


# --- directories ----------------------------------------------------------------------------------------


def test_directory_by_absolute_path(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", model__safetensors=10)
    found = read(launch(str(folder)))
    assert found == ModelConfig(
        str(folder / "config.json"), CONFIG, (folder / "config.json").stat().st_mtime_ns, 10
    )


def test_directory_relative_to_the_servers_working_directory(tmp_path: Path) -> None:
    make_model(tmp_path / "models/m")
    assert read(launch("models/m", cwd=str(tmp_path))).config == CONFIG
    assert read(launch("./models/m", cwd=str(tmp_path))).config == CONFIG


def test_directory_in_a_container(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    inside = tmp_path / "container"
    make_model(inside / "data/v2/m", model__safetensors=7)
    (inside / "models").symlink_to("/data/v2")
    proc.add(50, ["vllm"], root=str(inside), namespaces={"mnt": 7})
    found = ModelSource(proc.root).read(launch("/models/m", pid=50))
    assert isinstance(found, ModelConfig), found
    assert (found.path, found.weight_bytes) == (f"{proc.root}/50/root/data/v2/m/config.json", 7)


def test_host_path_is_not_taken_for_that_of_a_container(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    folder = make_model(tmp_path / "m")
    (proc.add(50, ["vllm"], root=None) / "ns/mnt").unlink()
    contained = Process(50, 1, 0.0, "vllm", None, None, None, "S", container="ab" * 32)
    found = ModelSource(proc.root).read(launch(str(folder), pid=50), process=contained)
    assert isinstance(found, Failure)
    on_host = Process(50, 1, 0.0, "vllm", None, None, None, "S")
    assert isinstance(ModelSource(proc.root).read(launch(str(folder), pid=50), process=on_host), ModelConfig)


def test_served_root_where_the_command_line_names_no_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    assert read(launch(None), served_root=str(folder)).config == CONFIG
    assert read(launch("not/here"), served_root=str(folder)).config == CONFIG


def test_other_config_path(tmp_path: Path) -> None:
    weights = make_model(tmp_path / "m", model__safetensors=5)
    other = make_model(tmp_path / "other", {"model_type": "other"}, model__safetensors=9)
    found = read(launch(str(weights), hf_config_path=str(other)))
    assert (found.config, found.weight_bytes) == ({"model_type": "other"}, 5)


def test_missing_config_path_is_not_replaced_by_the_models(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    assert refuse(launch(str(folder), hf_config_path="/no/such")).reason == "not_found"


# --- hub caches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "hub"),
    [
        ({"HF_HUB_CACHE": "{}/a", "HF_HOME": "{}/b", "HOME": "{}"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HF_HOME": "{}/b", "XDG_CACHE_HOME": "{}/c"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{}/c", "HOME": "{}"}, "c/huggingface/hub"),
        ({"HOME": "{}"}, ".cache/huggingface/hub"),
        ({"HF_HOME": "~/b", "HOME": "{}"}, "b/hub"),
        ({"TRANSFORMERS_CACHE": "{}/t", "HOME": "{}"}, "t"),
    ],
)
def test_caches(tmp_path: Path, environment: dict[str, str], hub: str) -> None:
    snapshot = make_snapshot(tmp_path / hub, "org/model", "c1")
    variables = {name: value.format(tmp_path) for name, value in environment.items()}
    found = read(launch("org/model", environment=variables))
    assert found.path == str(snapshot / "config.json")
    assert found.weight_bytes == 100


def test_home_of_the_servers_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_snapshot(tmp_path / ".cache/huggingface/hub", "model", "c1")

    class Entry:
        pw_dir = str(tmp_path)

    monkeypatch.setattr("pwd.getpwuid", {1234: Entry}.__getitem__)
    user = Process(50, 1, 0.0, "vllm", None, 1234, None, "S")
    assert read(launch("model"), process=user).path == str(snapshot / "config.json")
    stranger = Process(50, 1, 0.0, "vllm", None, 5, None, "S")
    assert refuse(launch("model"), process=stranger).reason == "not_cached"


def test_the_reference_chooses_the_snapshot(tmp_path: Path) -> None:
    for commit, ref in (("c1", "v1"), ("c2", "main"), ("c3", None)):
        make_snapshot(tmp_path, "org/m", commit, ref=ref)
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    for revision, commit in ((None, "c2"), ("v1", "c1"), ("c3", "c3")):
        found = read(launch("org/m", environment=environment, revision=revision))
        assert found.config["commit"] == commit


def test_without_a_reference_the_newest_snapshot(tmp_path: Path) -> None:
    for age, commit in ((30, "c1"), (10, "c2"), (20, "c3")):
        os.utime(make_snapshot(tmp_path, "org/m", commit, ref=None), (1000 - age, 1000 - age))
    assert read(launch("org/m", environment={"HF_HUB_CACHE": str(tmp_path)})).config["commit"] == "c2"


def test_revision_that_is_not_cached(tmp_path: Path) -> None:
    make_snapshot(tmp_path, "org/m", "c1")
    failure = refuse(launch("org/m", environment={"HF_HUB_CACHE": str(tmp_path)}, revision="v9"))
    assert failure.reason == "not_cached"
    assert "org/m at revision v9" in failure.detail


def test_weights_in_the_download_directory(tmp_path: Path) -> None:
    make_snapshot(tmp_path / "hub", "org/m", "c1")
    weights = make_snapshot(tmp_path / "weights", "org/m", "c1")
    (weights / "config.json").unlink()
    (weights / "more.safetensors").write_bytes(b"\0" * 11)
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    found = read(launch("org/m", environment=environment, download_dir=str(tmp_path / "weights")))
    assert found.path.startswith(str(tmp_path / "hub"))
    assert found.weight_bytes == 111


@pytest.mark.parametrize("layout", ["m/models/org/m", "m/org/m"])
def test_modelscope(tmp_path: Path, layout: str) -> None:
    folder = make_model(tmp_path / layout)
    environment = {"VLLM_USE_MODELSCOPE": "True", "MODELSCOPE_CACHE": str(tmp_path / "m")}
    assert read(launch("org/m", environment=environment)).path == str(folder / "config.json")


def test_model_that_is_not_cached(tmp_path: Path) -> None:
    failure = refuse(launch("org/m", environment={"HF_HUB_CACHE": str(tmp_path)}))
    assert (failure.reason, "org/m" in failure.detail) == ("not_cached", True)


# --- overrides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "method"), [("FP8", "modelopt"), ("NVFP4", "modelopt_fp4"), ("W8A8", None)]
)
def test_quantization_in_a_file_of_its_own(tmp_path: Path, algorithm: str, method: str | None) -> None:
    folder = make_model(tmp_path / "m")
    told = {"quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told), encoding="utf-8")
    quantization = read(launch(str(folder))).config["quantization_config"]
    assert quantization["quantization"] == told["quantization"]
    assert quantization.get("quant_method") == method


def test_overrides(tmp_path: Path) -> None:
    """A configuration within is merged; other objects are replaced."""
    overrides = {"hidden_size": 8, "rope_scaling": {"a": 3}, "text_config": {"y": 5, "z": 6}, "new": {"k": 1}}
    folder = make_model(tmp_path / "m")
    assert read(launch(str(folder), flags=Flags(hf_overrides=overrides))).config == {
        "model_type": "llama",
        "hidden_size": 8,
        "rope_scaling": {"a": 3},
        "text_config": {"x": 1, "y": 5, "z": 6},
        "new": {"k": 1},
    }


def test_overrides_of_one_server_do_not_reach_another(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    source = ModelSource()
    source.read(launch(str(folder), flags=Flags(hf_overrides={"text_config": {"x": 9}})))
    plain = source.read(launch(str(folder)))
    assert isinstance(plain, ModelConfig)
    assert plain.config == CONFIG


# --- weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, None),
        ({"model-1__safetensors": 3, "model-2__safetensors": 4, "pytorch_model__bin": 100, "x__gguf": 50}, 7),
        ({"pytorch_model__bin": 5, "training_args__bin": 100, "x__pt": 7}, 5),
        ({"model__pt": 5, "optimizer__pt": 100}, 5),
        ({"model__safetensors": 3, "consolidated__safetensors": 3}, 3),
        ({"consolidated__safetensors": 3}, 3),
        ({"x__gguf": 9}, 9),
        ({"tokenizer__json": 9}, None),
    ],
)
def test_weight_bytes(tmp_path: Path, files: dict[str, int], size: int | None) -> None:
    assert read(launch(str(make_model(tmp_path / "m", CONFIG, **files)))).weight_bytes == size


def test_weights_that_are_partly_missing_have_no_size(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", a__safetensors=3)
    (folder / "b.safetensors").symlink_to("nowhere")
    assert read(launch(str(folder))).weight_bytes is None


# --- failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "broken_json"), ("[1]", "not_an_object"), ("\xff", "broken_json"), ("[" * 100_000, "broken_json")],
)
def test_broken_files(tmp_path: Path, content: str, reason: str) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "config.json").write_text(content, encoding="latin-1")
    failure = refuse(launch(str(folder)))
    assert failure.reason == reason
    assert str(folder / "config.json") in failure.detail


def test_file_that_is_too_large(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    os.truncate(folder / "config.json", CONFIG_LIMIT + 1)
    assert refuse(launch(str(folder))).reason == "efbig"


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert refuse(launch(str(tmp_path))).reason == "einval"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["params.json"], "mistral_format"),
        (["m-Q4.gguf"], "gguf"),
        (["readme"], "no_config"),
        ([], "no_config"),
    ],
)
def test_directory_without_a_config(tmp_path: Path, files: list[str], reason: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    failure = refuse(launch(str(tmp_path)))
    assert failure.reason == reason
    assert str(tmp_path) in failure.detail


def test_file_instead_of_a_directory(tmp_path: Path) -> None:
    for name, reason in (("m.gguf", "gguf"), ("m.bin", "not_a_directory")):
        (tmp_path / name).touch()
        assert refuse(launch(str(tmp_path / name))).reason == reason


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("/no/such/model", "not_found"),
        ("./model", "not_found"),
        ("a/b/c", "not_found"),
        ("s3://bucket/model", "remote"),
        (None, "no_model"),
    ],
)
def test_models_that_are_nowhere(model: str | None, reason: str) -> None:
    assert refuse(launch(model, cwd="/")).reason == reason


def test_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m")

    def deny(path: Path, **_: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(models, "read_regular_file", deny)
    failure = refuse(launch(str(folder)))
    assert failure.reason == "eacces"
    assert failure.detail == f"model {folder}: {folder}/config.json: Permission denied"


# --- from one cycle to the next -------------------------------------------------------------------------


def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m", model__safetensors=3)
    source = ModelSource()
    first = source.read(launch(str(folder)))
    monkeypatch.setattr(models, "read_regular_file", None)
    assert source.read(launch(str(folder))) is first


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", model__safetensors=3)
    source = ModelSource()
    source.read(launch(str(folder)))
    (folder / "config.json").write_text('{"a": 1}')
    changed = source.read(launch(str(folder)))
    assert isinstance(changed, ModelConfig)
    assert changed.config == {"a": 1}
    (folder / "more.safetensors").write_bytes(b"\0" * 4)
    os.utime(folder, (1, 1))
    grown = source.read(launch(str(folder)))
    assert isinstance(grown, ModelConfig)
    assert grown.weight_bytes == 7


@pytest.mark.parametrize("name", ["loop", "a\0b"])
def test_name_that_leads_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert refuse(launch(f"{tmp_path}/{name}")).reason == "not_found"


def test_served_root_is_not_looked_for_once_the_model_is_found(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    found = ModelSource().read(launch(str(folder)), served_root=str(make_model(tmp_path / "other")))
    assert isinstance(found, ModelConfig)
    assert found.path == f"{folder}/config.json"
