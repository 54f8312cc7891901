"""The templates of examples/cluster: complete, and their commands train between hosts as under the schedulers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from laconic.train.config.toml import save_config
from laconic.train.report.metrics import read_metrics
from netlab import Lab, finish
from tests.distributed.processes import ROOT, environment
from tests.netlab.conftest import MakeLab
from tests.patience import patient
from tests.train.runs import tiny_config

FOLDER = ROOT / "examples" / "cluster"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_every_template_is_on_the_page_and_has_nothing_to_fill_in() -> None:
    page = (ROOT / "docs" / "multi_node.md").read_text()
    templates = sorted(FOLDER.iterdir())
    assert len(templates) == 4
    for template in templates:
        assert f"`{template.name}`" in page
        assert not re.search(r"<[a-z_ -]+>|\bTODO\b|\bFIXME\b|CHANGE.?ME|\{\{", template.read_text(), re.IGNORECASE)


@pytest.mark.parametrize("name", ["slurm.sbatch", "ray.sh"])
def test_scripts_are_of_valid_syntax(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_the_slurm_script_asks_for_one_launcher_per_node() -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert {"nodes", "gpus-per-node", "time", "requeue"} <= options.keys()


def test_the_indexed_job_and_its_service_belong_together() -> None:
    service, job = documents("kubernetes.yaml")
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    (container,) = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["RDZV_ENDPOINT"].split(":")[0] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["NPROC_PER_NODE"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    used = set(re.findall(r"\$([A-Z_]+)", container["command"][-1]))
    assert used <= variables.keys()


def test_the_pytorchjob_has_the_same_pod_for_master_and_workers() -> None:
    (job,) = documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])


def test_the_ray_script_says_how_it_is_used() -> None:
    done = subprocess.run(["bash", str(FOLDER / "ray.sh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: ray.sh head | worker | submit COMMAND...\n")


def slurm(host: int, lab: Lab, config: str) -> tuple[Sequence[str], dict[str, str]]:
    """The whole script; srun and scontrol are stand-ins, and Slurm's variables those of one task on each node."""
    own = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "host[0-1]"}
    own |= {"SLURM_NODEID": str(host), "SLURMD_NODENAME": lab.address(host)}
    return ["bash", str(FOLDER / "slurm.sbatch"), config], own


def kubernetes(host: int, lab: Lab, config: str) -> tuple[Sequence[str], dict[str, str]]:
    (container,) = documents("kubernetes.yaml")[1]["spec"]["template"]["spec"]["containers"]
    own = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    own |= {"NPROC_PER_NODE": "1", "RDZV_ENDPOINT": f"{lab.address(0)}:29400", "CONFIG": config}
    return container["command"], own | {"JOB_COMPLETION_INDEX": str(host), "POD_IP": lab.address(host)}


def pytorchjob(host: int, lab: Lab, config: str) -> tuple[Sequence[str], dict[str, str]]:
    (job,) = documents("pytorchjob.yaml")
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    own = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(host), "PET_MASTER_PORT": "23456"}
    return container["command"], own | {"PET_MASTER_ADDR": lab.address(0), "CONFIG": config}


def programs(folder: Path, head: str) -> Path:
    """Stand-ins for what the hosts of a lab do not have."""
    folder.mkdir()
    texts: Mapping[str, str] = {
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
        "scontrol": f'[ "$*" = "show hostnames host[0-1]" ] && printf "{head}\\nhost1\\n"',
        "srun": 'shift; exec "$@"',
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def test_the_slurm_script_takes_the_first_of_more_nodes_than_a_pipe_holds(tmp_path: Path) -> None:
    """Whoever reads only the first line ends `scontrol` with SIGPIPE, with few nodes now and then as well."""
    folder = programs(tmp_path / "bin", "")
    (folder / "scontrol").write_text("#!/bin/bash\nseq -f node%g 30000\n")
    (folder / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    own = {"SLURM_NNODES": "30000", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-30000]", "SLURM_NODEID": "0"}
    variables = environment(SLURMD_NODENAME="node1") | own
    variables["PATH"] = f"{folder}:{variables['PATH']}"
    command = ["bash", str(FOLDER / "slurm.sbatch"), "run.toml"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    arguments = done.stdout.splitlines()
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "node1:29400"
    assert arguments[-4:] == ["laconic", "train", "--config", "run.toml"]


@pytest.mark.slow
@pytest.mark.parametrize("template", [slurm, kubernetes, pytorchjob])
def test_two_hosts_train_to_the_end(template: Any, make_lab: MakeLab, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"parallel": "ddp", "zip": "on"})
    save_config(config, tmp_path / "config.toml")
    lab = make_lab(2, 1e9)
    folder = programs(tmp_path / "bin", lab.address(0))
    started = []
    for host in range(2):
        command, own = template(host, lab, str(tmp_path / "config.toml"))
        variables = environment(PYTHONWARNINGS="ignore", GLOO_SOCKET_IFNAME="eth0") | own
        variables["PATH"] = f"{folder}:{variables['PATH']}"
        started.append(lab.start(host, command, variables, cwd=ROOT))
    for ending in finish(started, patient(280)):
        assert ending.code == 0, ending.out + ending.err
    entries = read_metrics(str(config.run_dir))
    assert [entry["step"] for entry in entries if "loss" in entry][-1] == config.steps
    assert all(traffic.sent_nbytes > 0 for traffic in lab.traffic().values())
