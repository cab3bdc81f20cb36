"""``weightsync doctor``: findings, remedies and exit codes."""

import json
import subprocess
import sys

import pytest


def test_findings_have_states_and_remedies(weightsync):
    answer = weightsync("doctor", "--json")
    found = answer.json["findings"]
    assert {"room", "locks", "cores", "vLLM"} <= {finding["check"] for finding in found}
    problems = [finding for finding in found if finding["state"] == "problem"]
    assert answer.code == bool(problems)
    assert all(finding["remedy"] for finding in problems)


def test_too_little_room_is_a_problem_and_an_exit_code(weightsync, run_dir):
    answer = weightsync("doctor", "--scheme", f"shm://{run_dir}?slots=3", "--model-size", "900TB")
    assert answer.code == 1
    assert "3 copies of 900000.00 GB need" in answer.words
    assert "--shm-size" in answer.words
    assert "or use fewer slots=, a smaller dtype=, or DiskScheme." in answer.words
    assert "host name" not in answer.words
    assert "1 problem" in answer.words


def test_only_what_matters_for_a_scheme_is_looked_at(weightsync):
    url = "nccl://127.0.0.1:29597?backend=gloo"
    found = weightsync("doctor", "--scheme", url, "--json").json["findings"]
    assert not {f["check"] for f in found} & {"torchrl", "trl", "verl", "ray", "fsspec", "httpx"}
    assert not [f for f in found if f["remedy"] and "master_address=" in f["remedy"]]
    (address,) = [f for f in found if f["check"] == "address"]
    assert address["words"] == "127.0.0.1, this host alone"


def test_the_size_of_a_model_is_that_of_its_files(weightsync, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1500)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 1500)
    assert "2 copies of 3.00 kB" in weightsync("doctor", "--model", tmp_path).words


@pytest.mark.parametrize("columns", [40, 80])
def test_it_fits_the_terminal(weightsync, columns):
    answer = weightsync("doctor", columns=columns)
    assert max(map(len, answer.out.splitlines())) <= columns


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scheme", "nothing://x"],
        ["--model-size", "much"],
        ["--model", "/nothing"],
        ["--model", "/tmp", "--model-size", "1GB"],
    ],
)
def test_what_is_refused(weightsync, arguments):
    answer = weightsync("doctor", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err


def test_a_path_that_is_not_there_is_a_finding(weightsync):
    answer = weightsync("doctor", "--path", "/nothing/here/run", "--json")
    assert answer.code == 1
    (room,) = [f for f in answer.json["findings"] if f["check"] == "room"]
    assert "there is no such directory" in room["words"]


def test_neither_torch_nor_vllm_is_imported_for_it_nor_needed():
    """As in an environment that has neither, and no GPU."""
    code = (
        "import sys, json\n"
        "for name in ('torch', 'vllm', 'ray', 'httpx', 'fsspec'): sys.modules[name] = None\n"
        "sys.argv = ['weightsync', 'doctor', '--json']\n"
        "from weightsync.cli import main\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode in (0, 1), ran.stderr
    found = json.loads(ran.stdout)["findings"]
    assert not [f for f in found if "could not be looked at" in f["words"]]
