from __future__ import annotations

import pytest

from kvwatch.observe.cgroups import describe_path, parse_cgroup

ID = "0123456789abcdef" * 4
POD = "1f2e3d4c-5b6a-4978-8695-a4b3c2d1e0f9"
POD_SLICE = POD.replace("-", "_")


@pytest.mark.parametrize(
    "path",
    [
        f"/system.slice/docker-{ID}.scope",
        f"/docker/{ID}",
        f"/docker/{ID}/init.scope",
        f"/system.slice/containerd.service/{ID}",
        f"/machine.slice/libpod-{ID}.scope/container",
        f"/libpod_parent/libpod-{ID}",
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope",
        f"/../../{ID}",
    ],
)
def test_containers_by_id(path: str) -> None:
    found = describe_path(path)
    assert found.container == ID
    assert found.pod is None
    assert found.unit is None


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_SLICE}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{POD_SLICE}.slice/crio-{ID}.scope",
        f"/kubepods/besteffort/pod{POD}/{ID}",
        f"/system.slice/containerd.service/kubepods-besteffort-pod{POD_SLICE}.slice:cri-containerd:{ID}",
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{POD_SLICE}.slice/cri-containerd-{ID}.scope",
    ],
)
def test_pods(path: str) -> None:
    found = describe_path(path)
    assert found.container == ID
    assert found.pod == POD
    assert found.unit == f"pod {POD}"


def test_static_pods_have_uids_without_hyphens() -> None:
    assert describe_path(f"/kubepods/burstable/pod{'ab' * 16}/{ID}").pod == "ab" * 16


@pytest.mark.parametrize(
    "path", [f"/machine.slice/libpod-conmon-{ID}.scope", f"/system.slice/crio-conmon-{ID}.scope"]
)
def test_monitor_of_a_container_is_outside_of_it(path: str) -> None:
    assert describe_path(path).container is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/lxc.payload.gpu1/system.slice/x.service", "gpu1"),
        ("/lxc/gpu2", "gpu2"),
        ("/lxc.payload/gpu3", "gpu3"),
    ],
)
def test_lxc_containers_go_by_name(path: str, name: str) -> None:
    assert describe_path(path).container == name


@pytest.mark.parametrize("path", ["/lxc.monitor.gpu1", "/lxc"])
def test_lxc_monitor_is_no_container(path: str) -> None:
    assert describe_path(path).container is None


@pytest.mark.parametrize(
    "path",
    [
        "/slurm/uid_1000/job_1234/step_0/task_0",
        "/slurm_node7/uid_1000/job_1234/step_batch",
        "/system.slice/slurmstepd.scope/job_1234/step_0/user/task_0",
        "/system.slice/node7_slurmstepd.scope/job_1234/step_batch/user/task_0",
    ],
)
def test_slurm_jobs(path: str) -> None:
    assert describe_path(path).unit == "slurm job 1234"


def test_job_outside_of_slurm_is_none() -> None:
    assert describe_path("/ci.slice/job_12").slurm_job is None


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/ollama.service", "ollama.service"),
        ("/system.slice/system-vllm.slice/vllm@llama.service", "vllm@llama.service"),
        ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service", "jupyter.service"),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", "user@1000.service"),
        ("/gpu.slice/gpu-inference.slice", "gpu-inference.slice"),
        (f"/system.slice/vllm.service/libpod-payload-{ID}", "vllm.service"),
        ("/system.slice/docker.service", "docker.service"),
        ("/system.slice", None),
        ("/init.scope", None),
        ("/", None),
    ],
)
def test_systemd_units(path: str, unit: str | None) -> None:
    assert describe_path(path).unit == unit


def test_version_2() -> None:
    found = parse_cgroup("0::/system.slice/ollama.service\n")
    assert found is not None
    assert (found.path, found.unit) == ("/system.slice/ollama.service", "ollama.service")


def test_version_1_takes_the_line_that_says_most() -> None:
    found = parse_cgroup(
        f"12:cpuset:/\n9:name=systemd:/\n4:memory:/docker/{ID}\n1:cpu,cpuacct:/docker/{ID}\n0::/\n"
    )
    assert found is not None
    assert (found.path, found.container) == (f"/docker/{ID}", ID)


def test_hybrid_prefers_systemds_own_tree() -> None:
    found = parse_cgroup(
        "4:memory:/user.slice\n1:name=systemd:/system.slice/a.service\n0::/system.slice/a.service\n"
    )
    assert found is not None
    assert found.unit == "a.service"


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "a:b"])
def test_what_is_no_cgroup_file_gives_nothing(text: str) -> None:
    assert parse_cgroup(text) is None


def test_root_of_everything_has_the_path_slash() -> None:
    found = parse_cgroup("0::/\n")
    assert found is not None
    assert (found.path, found.container, found.unit) == ("/", None, None)
