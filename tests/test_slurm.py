"""Every batch file of slurm/ runs on a real Slurm of two nodes, with the numbers of rung 00."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import start_warm_parent

from ladder import of_the_day

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "slurm" / "laptop_cluster.sh"
FILES = sorted((ROOT / "slurm").glob("*.sbatch"))
RUNGS = [path for path in FILES if re.match(r"\d\d", path.name)]  # one file a rung and launcher
LAUNCHER = "# ---- launcher "
# At most 4 ranks a job, and few CPUs: this may be a small machine. One task a node or one a rank?
ONE_TASK = re.compile(r"^#SBATCH --ntasks-per-node=1$", re.MULTILINE)
HAS_NODES = re.compile(r"^#SBATCH --nodes=(\d+)$", re.MULTILINE)


def call(*command, timeout=300, **options):
    """Run a command; its stdout and stderr are in .stdout, its exit code in .returncode."""
    options = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
    return subprocess.run([str(part) for part in command], timeout=timeout, cwd=ROOT, **options)


class Cluster:
    """A running cluster: submit a job, wait for its end."""

    def __init__(self, folder):
        self.logs, self.env = folder / "logs", os.environ | {"LAPTOP_DIR": str(folder / "slurm")}
        self.parents = []  # of warm starts, one a node
        self.logs.mkdir()

    def slurm(self, *command):
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # of the warm starts
        return call(CLUSTER, *command, env=self.env | path)

    def submit(self, path, sbatch_options=(), training_options=()):
        log = f"--output={self.logs}/%x-%j.out"
        command = ["exec", "sbatch", "--parsable", log, *sbatch_options, path, *training_options]
        answer = self.slurm(*command)
        assert answer.returncode == 0, answer.stdout
        return answer.stdout.strip()

    def wait(self, job, timeout=400):  # only a hang takes so long
        """Return (state, exit code, log) of a job that has ended; after timeout s cancel it."""
        deadline = time.monotonic() + timeout
        while True:  # not `sbatch --wait`: that looks every half minute only
            text = self.slurm("exec", "scontrol", "show", "job", "-o", job).stdout
            fields = dict(re.findall(r"(\w+)=(\S+)", text))
            if fields.get("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                break
            if time.monotonic() > deadline:
                self.slurm("exec", "scancel", job)
                pytest.fail(f"job {job} has not ended after {timeout} s: {text}")
            time.sleep(0.5)
        log = "\n".join(path.read_text() for path in self.logs.glob(f"*-{job}.out"))
        return fields["JobState"], fields["ExitCode"], log

    def run(self, path, sbatch_options=(), training_options=()):
        return self.wait(self.submit(path, sbatch_options, training_options))


@pytest.fixture(scope="module")
def cluster():
    """Skip where there can be no cluster; on a CI machine there has to be one."""
    missing = "Slurm is not installed" if not shutil.which("slurmctld", path="/usr/sbin") else ""
    if os.geteuid() != 0:
        missing = "the nodes' namespaces need root"
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        running = Cluster(Path(folder))
        try:
            start = running.slurm("start")
            assert start.returncode == 0, start.stdout
            if "WARM" in os.environ:
                warm = partial(start_warm_parent, os.environ["WARM"], env=running.env)
                running.parents = [warm(CLUSTER, "node", node) for node in ("n1", "n2")]
            yield running
        finally:
            stop = running.slurm("stop")
            assert stop.returncode == 0 and not (Path(folder) / "slurm").exists(), stop.stdout


def small(path):
    """Return (sbatch options, world size): two GPUs a node, or one where Lightning is slow."""
    text = path.read_text()
    nodes, gpus = int(HAS_NODES.search(text)[1]), 2
    if "--gpus-per-node=1\n" in text or path.name.startswith("04"):
        gpus = 1
    options = [f"--gpus-per-node={gpus}", "--cpus-per-task=2"]
    if not ONE_TASK.search(text):
        options.append(f"--ntasks-per-node={gpus}")
    return options, nodes * gpus


def losses(path):
    return [json.loads(line)["train_loss"] for line in path.read_text().splitlines()]


def training(cluster, name):
    checkpoint = ["--checkpoint", cluster.logs / f"{name}.pt"]
    return ["--epochs", 2, *checkpoint, "--log-json", cluster.logs / f"{name}.jsonl"]


@pytest.fixture(scope="module")
def reference(cluster, jobs_with_an_own_environment):
    """The losses of rung 00, from its batch file."""
    path = ROOT / "slurm" / "00_single_gpu.sbatch"
    state, code, log = cluster.run(path, small(path)[0], training(cluster, path.stem))
    assert (state, code) == ("COMPLETED", "0:0"), log
    found = losses(cluster.logs / f"{path.stem}.jsonl")
    assert len(found) == 2 and found[1] < found[0]
    assert f"epoch 2/2 | train loss {found[1]:.4f} |" in log
    assert "world size 1 |" in log
    return found


@pytest.mark.parametrize("path", [p for p in FILES if p.name[:2] != "00"], ids=lambda p: p.stem)
def test_a_batch_file_trains_and_prints_the_numbers_of_rung_00(cluster, reference, path):
    options, world_size = small(path)
    state, code, log = cluster.run(path, options, training(cluster, path.stem))
    assert (state, code) == ("COMPLETED", "0:0"), log
    assert len(re.findall(rf"\.py \| world size {world_size} \|", log)) == 1, log
    assert re.findall(r"^epoch 2/2 \| train loss (\S+) ", log, re.M) == [f"{reference[-1]:.4f}"]
    assert losses(cluster.logs / f"{path.stem}.jsonl") == pytest.approx(reference, abs=5e-5)
    nodes = "n[1-2]" if world_size > 2 or path.name.startswith("04") else "n1"
    assert re.search(rf"^job \d+ \| restart 0 \| {re.escape(nodes)} \| \d GPUs each$", log, re.M), (
        log
    )
    if path.name.startswith("03"):
        table = re.findall(r"^rank (\d) of 4 \| local rank (\d) on (n\d) \|", log, re.M)
        rows = [("0", "0", "n1"), ("1", "1", "n1"), ("2", "0", "n2"), ("3", "1", "n2")]
        assert sorted(table) == rows, log


NO_GPU = ["--gpus-per-node=0", "--cpus-per-task=2"]
EPOCH = ["--epochs", 1]


@pytest.fixture(scope="module")
def jobs_with_an_own_environment(cluster):
    """Two at once, and first: Slurm takes a minute to load what --export does not name."""
    path, some = ROOT / "slurm" / "03_multinode_srun.sbatch", "--export=PATH,TMPDIR,OMP_NUM_THREADS"
    bare = cluster.logs / "bin"  # with neither python nor torch
    bare.mkdir()
    return {
        "some": cluster.submit(path, [*NO_GPU, "--ntasks-per-node=1", some], EPOCH),
        "bare": cluster.submit(path, [*NO_GPU, f"--export=PATH={bare}:/usr/sbin"]),
    }


def test_a_partition_without_gpus_needs_no_edit(cluster, reference, jobs_with_an_own_environment):
    """Nor does a job that gets only a part of the environment; srun would hand on no more."""
    torchrun = cluster.submit(ROOT / "slurm" / "02_torchrun.sbatch", NO_GPU, EPOCH)
    for job in (torchrun, jobs_with_an_own_environment["some"]):
        state, code, log = cluster.wait(job)
        assert (state, code) == ("COMPLETED", "0:0"), log
        assert "| 0 GPUs each\n" in log and "world size 2 |" in log
        assert f"epoch 1/1 | train loss {reference[0]:.4f} |" in log


def test_a_training_that_fails_makes_a_job_that_failed(cluster):
    """With one task, its exit code is the job's: the training's own, or torchrun's, always 1.

    With several, srun reports the highest: it may be 143, of a task that was ended for the others.
    """
    one, two = ["--gpus-per-node=1", "--cpus-per-task=1"], ["--ntasks-per-node=1", "--nodes=2"]
    cases = [
        ("00_single_gpu", one, ["--dataset", "cats"], "no --dataset cats: use digits, ", ["2:0"]),
        ("02_torchrun", [*one, "--gpus-per-node=2"], ["--batch-size", 97], "use 96 or 98", ["1:0"]),
        ("03_multinode", one, ["--batch-size", 97], "use 96 or 98", ["1:0", "143:0"]),
        ("03_multinode_srun", [*one, *two], ["--batch-size", 97], "96 or 98", ["2:0", "143:0"]),
    ]
    jobs = [cluster.submit(ROOT / "slurm" / f"{case[0]}.sbatch", *case[1:3]) for case in cases]
    for job, (name, _, _, line, codes) in zip(jobs, cases, strict=True):
        state, code, log = cluster.wait(job)
        assert state == "FAILED" and code in codes, f"{name}: {code}\n{log}"
        assert line in log and "epoch" not in log, log


def test_what_cannot_work_is_refused_in_one_line(cluster, tmp_path, jobs_with_an_own_environment):
    """No job of these gets as far as srun."""
    srun_file = ROOT / "slurm" / "03_multinode_srun.sbatch"
    jobs = {
        "no 03_multinode.py in": cluster.submit(srun_file, [f"--chdir={tmp_path}"]),
        "1 GPUs a node: --ntasks-per-node=1": cluster.submit(srun_file, ["--gpus-per-node=1"]),
    }
    line = "python cannot import torch (command not found): see EDIT"
    jobs[line] = jobs_with_an_own_environment["bare"]
    for line, job in jobs.items():
        state, code, log = cluster.wait(job)
        assert (state, code) == ("FAILED", "1:0"), log
        assert line in log and len(log.splitlines()) <= 2 and "rank" not in log, log


def edited(cluster, name, old, new):
    """Return a copy of a batch file, in another folder, with a line changed."""
    text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    assert re.search(old, text, re.M), old
    path = cluster.logs / f"{name}_edited.sbatch"
    path.write_text(re.sub(old, new, text, flags=re.M))
    return path


def test_a_script_of_ones_own_from_any_folder(cluster, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\nprint(f'rank {os.environ[\"RANK\"]} {os.getcwd()}\\n', end='')\n"
    )
    path = edited(cluster, "03_multinode", "^SCRIPT=.*", "SCRIPT=mine.py")
    options = [*NO_GPU, f"--chdir={tmp_path}"]
    state, code, log = cluster.run(path, options)
    assert (state, code) == ("COMPLETED", "0:0"), log
    ranks = sorted(re.findall(r"^rank (\d) (.*)$", log, re.M))
    assert ranks == [(str(rank), str(tmp_path)) for rank in range(4)], log


@pytest.mark.parametrize("name", of_the_day(["03_multinode", "03_multinode_srun"], 1))
def test_a_job_whose_port_is_taken_fails_and_does_not_join(cluster, name):
    """Both jobs get port 20007; the second one ends, and the first one does not notice."""
    path = edited(cluster, name, r"(port|PORT)=\$\(\(.*\)\)", r"\1=20007")
    options = ["--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1"]
    holder = cluster.submit(path, options, ["--epochs", 60])
    try:
        deadline = time.monotonic() + 90
        while not any(
            "epoch 1/" in log.read_text() for log in cluster.logs.glob(f"*-{holder}.out")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        state, code, log = cluster.run(path, options, ["--epochs", 1])
        assert state == "FAILED" and "epoch 1/" not in log, log
        assert re.search("EADDRINUSE|RendezvousConnectionError", log), log
        assert "=RUNNING" in cluster.slurm("exec", "scontrol", "show", "job", holder).stdout
    finally:
        cluster.slurm("exec", "scancel", holder)
        cluster.wait(holder)


def test_ranks_meet_on_the_node_of_task_0(cluster, reference, tmp_path):
    """With --distribution=arbitrary that need not be the first node of the job."""
    (tmp_path / "hosts").write_text("n2\nn1\n")
    path = ROOT / "slurm" / "03_multinode_srun.sbatch"
    options = ["--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1"]
    cluster.env["SLURM_HOSTFILE"] = str(tmp_path / "hosts")
    try:
        job = cluster.submit(path, [*options, "--distribution=arbitrary"], EPOCH)
    finally:
        del cluster.env["SLURM_HOSTFILE"]
    state, code, log = cluster.wait(job)
    assert (state, code) == ("COMPLETED", "0:0"), log
    assert re.search(r"^rank 0 of 2 \| local rank 0 on n2 ", log, re.M), log
    assert f"epoch 1/1 | train loss {reference[0]:.4f} |" in log


def test_torchruns_that_do_not_know_each_other(cluster):
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=1", "03_multinode.py"]
    done = cluster.slurm("exec", "srun", "-N2", "--ntasks-per-node=1", *torchrun)
    line = "srun has started 2 torchruns that do not know each other: torchrun --nnodes=2"
    line += " --rdzv-backend=c10d --rdzv-id=MY_JOB --rdzv-endpoint=HEAD_NODE:29400"
    assert done.returncode != 0 and f"03_multinode.py: {line}" in done.stdout, done.stdout
    assert "epoch 1/" not in done.stdout


def test_a_shell_of_srun_is_not_a_launch_but_an_srun_in_it_is(cluster, tmp_path):
    """The other tasks of srun --pty have no terminal, and run the script too: only task 0 shall."""
    count = "import checks; print('tasks', *checks._slurm_step())"
    (tmp_path / "typed.sh").write_text(
        f"""[ "$SLURM_PROCID" = 0 ] || exit 0
python -c "{count}" </dev/null
srun --overlap --ntasks=2 --ntasks-per-node=2 python -c "{count}"
"""
    )
    srun = f"srun -N1 --ntasks=4 --ntasks-per-node=4 --pty bash {tmp_path}/typed.sh"
    done = call("script", "-qec", f"{CLUSTER} exec {srun}", "/dev/null", env=cluster.env)
    assert re.findall(r"tasks (\d) 1", done.stdout) == ["1", "2", "2"], done.stdout


def test_the_nodes_are_apart_and_stop_leaves_nothing(cluster):
    """A node has its own host name and address, which the machine does not see."""
    show = "echo $(hostname) $(hostname -I)"
    lines = cluster.slurm("exec", "srun", "-N2", "sh", "-c", show).stdout.splitlines()
    assert sorted(lines) == ["n1 10.99.0.11", "n2 10.99.0.12"]
    assert not {"switch", "to-n1"} & set(os.listdir("/sys/class/net"))
    folder = tempfile.mkdtemp(prefix="slurm-")
    env = os.environ | {"LAPTOP_DIR": folder, "LAPTOP_MODE": "ports", "LAPTOP_PORT": "17900"}
    try:
        assert call(CLUSTER, "start", env=env).returncode == 0
        wrap = ["sbatch", "-o", "/dev/null", "--wrap", "exec sleep 987"]
        assert call(CLUSTER, "exec", *wrap, env=env).returncode == 0
    finally:
        stop = call(CLUSTER, "stop", env=env)
    assert stop.returncode == 0, stop.stdout
    assert not Path(folder).exists()
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            assert mark not in environ.read_bytes(), environ


# ---- without a cluster ---------------------------------------------------------------------------


def test_the_cluster_says_what_is_wrong_in_one_line(tmp_path):
    cases = {
        ("frob",): "laptop_cluster.sh: no command frob; see",
        ("exec",): "laptop_cluster.sh: exec needs a command, such as sbatch FILE\n",
        ("status",): "laptop_cluster.sh: the cluster is not running: ",
        ("kill", "n1"): "laptop_cluster.sh: the cluster is not running: ",
    }
    for command, line in cases.items():
        answer = call(CLUSTER, *command, env=os.environ | {"LAPTOP_DIR": str(tmp_path / "none")})
        assert answer.returncode == 1 and answer.stdout.startswith(line), answer.stdout
        assert answer.stdout.count("\n") == 1
    (tmp_path / "thesis.tex").touch()
    answer = call(CLUSTER, "start", env=os.environ | {"LAPTOP_DIR": str(tmp_path)})
    assert answer.returncode == 1 and (tmp_path / "thesis.tex").exists()


def test_the_cluster_names_the_packages_that_are_missing(tmp_path):
    """With a PATH that has every tool of the script but Slurm's."""
    text = CLUSTER.read_text().replace("PATH=$PATH:/usr/sbin:/sbin\n", "")
    script = tmp_path / "laptop_cluster.sh"
    script.write_text(text)
    for tool in ("bash", "id", "readlink", "unshare", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    answer = call("bash", script, "start", env={"PATH": str(tmp_path)})
    assert answer.returncode == 1 and answer.stdout.count("\n") == 1, answer.stdout
    assert "slurmctld slurmd sbatch munged" in answer.stdout
    assert "apt-get install --no-install-recommends slurmctld slurmd" in answer.stdout


def code_of(path):
    """Return the lines of a batch file that bash runs, and those before the first of them."""
    lines = path.read_text().splitlines()
    is_code = [bool(line.strip()) and not line.lstrip().startswith("#") for line in lines]
    first = is_code.index(True)
    return [line for line, yes in zip(lines, is_code, strict=True) if yes], lines[:first]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_batch_file_is_well_formed(path):
    text, (code, header) = path.read_text(), code_of(path)
    assert call("bash", "-n", path).returncode == 0
    assert text.startswith("#!/bin/bash\n")
    # Slurm silently ignores an #SBATCH after the first command, and "# SBATCH" everywhere.
    assert [ln for ln in text.splitlines() if ln.startswith("#SBATCH")] == [
        ln for ln in header if ln.startswith("#SBATCH")
    ]
    assert not re.search(r"^#+ +SBATCH", text, re.M)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert options["job-name"] == path.stem
    assert options["output"] == "%x-%j.out"  # no folder that might be missing
    # A job that is put back into the queue keeps the log of its earlier attempts.
    assert "#SBATCH --open-mode=append\n#SBATCH --requeue\n" in text
    asked = {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"}
    assert asked <= set(options)
    assert not any("SLURM_LAUNCH_NODE_IPADDR" in ln or "CUDA_VISIBLE_DEVICES" in ln for ln in code)
    assert text.count("---- EDIT:") == 1 and text.count("\n") <= 45
    # Nothing is exported that the launcher does not read.
    assert ("MASTER_ADDR" in text) == (not ONE_TASK.search(text))
    assert ("NPROC" in text) == path.name.startswith(("01", "02", "03_multinode."))


def parts(path):
    """Return the three parts of a batch file: header, what all files share, launcher."""
    header, rest = path.read_text().split("\n# ---- EDIT:")
    shared, launcher = rest.split(LAUNCHER)
    return header, re.sub("^SCRIPT=.*", "SCRIPT=", shared, flags=re.M), launcher


def test_the_batch_files_differ_in_header_and_launcher_only():
    assert len({parts(path)[1] for path in FILES}) == 1
    assert len(RUNGS) >= 6


@pytest.mark.parametrize("path", RUNGS, ids=lambda p: p.stem)
def test_the_last_command_is_the_launcher(path):
    """Or the job would have another exit code than the training."""
    launcher = parts(path)[2]
    assert launcher.count('"${srun[@]}"') == 1
    assert re.sub(r"\\\n", "", launcher).rstrip().endswith('"$@"')
    srun = re.search(r"^srun=\((.*)\)$", path.read_text(), re.M)[1]
    assert '--kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"' in srun


MEET = [path for path in RUNGS if "scontrol" in path.read_text()]


def stubbed(path, folder, job_id=7, **stubs):
    """Run a batch file with bash, where scontrol, python and srun are stubs; srun leaves a mark."""
    stubs = {"scontrol": "echo n1", "python": "exit 0", "srun": f"touch {folder}/started"} | stubs
    for name, body in stubs.items():
        stub = folder / name
        stub.write_text(f"#!/bin/sh\n{body}\n")
        stub.chmod(0o755)
    job = {"JOB_ID": job_id, "JOB_NAME": "test", "JOB_NODELIST": "n1", "NNODES": 1}
    job |= {"NTASKS_PER_NODE": 1, "CPUS_PER_TASK": 1, "GPUS_ON_NODE": 1}
    env = {f"SLURM_{name}": str(value) for name, value in job.items()}
    env["PATH"] = f"{folder}:/usr/bin:/bin"
    return call("bash", "--norc", "--noprofile", path, env=env)


@pytest.mark.parametrize("path", MEET, ids=lambda p: p.stem)
def test_without_a_head_node_nothing_starts(path, tmp_path):
    """scontrol fails: no fallback to an address that may be the wrong one."""
    answer = stubbed(path, tmp_path, scontrol="exit 1")
    assert answer.returncode != 0 and not (tmp_path / "started").exists()
    assert answer.stdout.endswith("test: scontrol does not name the nodes\n"), answer.stdout
    answer = stubbed(path, tmp_path)  # and with it, the stubs do start
    assert answer.returncode == 0 and (tmp_path / "started").exists(), answer.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("line", ["source /nowhere", "conda activate my_env"])
def test_a_line_of_the_edit_block_that_fails_ends_the_job(path, line, tmp_path):
    text = path.read_text().replace("# module load python\n", f"{line}\n")
    edited = tmp_path / path.name
    edited.write_text(text)
    answer = stubbed(edited, tmp_path)
    assert answer.returncode != 0 and not (tmp_path / "started").exists()
    why, ours = answer.stdout.splitlines()  # bash's reason, and where
    assert ours == f"test: this line of the EDIT block has failed: {line}", answer.stdout


def test_a_batch_file_is_for_sbatch():
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    for path in FILES:
        answer = call("bash", "--norc", "--noprofile", path, env=env)
        assert answer.returncode != 0 and "this file is for sbatch" in answer.stdout


@pytest.mark.parametrize(
    "path", [p for p in FILES if "scontrol show" in p.read_text()], ids=lambda p: p.stem
)
def test_two_jobs_of_a_user_meet_at_two_ports(path, tmp_path):
    """Also where they run on the same nodes. Below 32768, where the system gives out none."""
    ports = []
    for job in (4217, 4218, 24217):  # the last one may have the first one's port
        answer = stubbed(path, tmp_path, job, srun='echo "ends at $MASTER_ADDR:$MASTER_PORT $*"')
        assert answer.returncode == 0, answer.stdout
        (port,) = re.findall(r"(?:at |--rdzv-endpoint=)n1:(\d+) ", answer.stdout)
        ports.append(int(port))
        if "rdzv" in path.read_text():
            assert f"--rdzv-id={job} " in answer.stdout
    assert ports[0] != ports[1] and all(20000 <= port < 30000 for port in ports), ports


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_job_has_the_exit_code_of_the_training(path, tmp_path):
    """A job that reads COMPLETED is looked at by nobody. What asked to be requeued, is."""
    asked = tmp_path / "asked"
    scontrol = f'echo n1; [ "$1" != requeue ] || echo "$*" >>{asked}'
    for code in (0, 1, 3, 75, 137, 138, 143):
        answer = stubbed(path, tmp_path, srun=f"exit {code}", scontrol=scontrol)
        assert answer.returncode == code, answer.stdout
        wanted = path.stem == "requeue" and code in (75, 138)
        assert asked.exists() == wanted, f"{code}: requeued or not"
        if wanted:
            assert asked.read_text() == "requeue 7\n"
            asked.unlink()
