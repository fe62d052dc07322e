"""``docker-compose.yml`` and ``Dockerfile``, as far as they can be held to without a container engine."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from inkling import tritonserver
from inkling.cli import app
from inkling.server import EXIT_TIMEOUT_S, ServerOptions
from inkling.settings import Settings
from inkling.tritonserver import ServerError

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "tests" / "compose" / "compose-spec.json").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVER = COMPOSE["services"]["inkling"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNITS = {"s": 1, "m": 60}


def problems(compose: dict) -> list[str]:
    validator = jsonschema.Draft7Validator(SCHEMA)
    return [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(compose)]


def seconds(text: str) -> float:
    return float(text[:-1]) * UNITS[text[-1]]


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction, comments dropped and continued lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def named(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_the_compose_file_keeps_the_specification():
    assert problems(COMPOSE) == []


@pytest.mark.parametrize(
    "path", [(), ("services", "inkling"), ("services", "inkling", "healthcheck"), ("services", "grafana")]
)
def test_a_misspelled_key_is_found_at_every_level(path):
    compose = deepcopy(COMPOSE)
    place = compose
    for key in path:
        place = place[key]
    place["shm_sizee"] = "2gb"
    assert any("shm_sizee" in problem for problem in problems(compose))


def test_no_service_is_privileged_or_listens_beyond_this_machine():
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & set(service), name


def test_the_server_runs_as_a_user_and_reads_weights_only():
    assert int(SERVER["user"].split(":")[0]) > 0 and named("USER")[-1] == SERVER["user"]
    weights = next(v for v in SERVER["volumes"] if SERVER["environment"]["INKLING_CHECKPOINT"] in v)
    assert weights.endswith(":ro")


def test_what_is_compiled_goes_to_the_volume():
    volume, folder = next(v for v in SERVER["volumes"] if "cache" in v).split(":")
    assert volume in COMPOSE["volumes"]
    assert f"install -d -o 1000 -g 1000 {folder}" in DOCKERFILE, (
        "a new volume takes owner and mode from there"
    )
    variables = dict(item.split("=") for item in shlex.split(" ".join(named("ENV"))))
    for name in ("HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert variables[name].startswith(folder), name


def test_the_container_is_given_the_time_that_a_drain_takes():
    options = ServerOptions()
    assert "--drain-timeout" not in SERVER["command"]
    assert seconds(SERVER["stop_grace_period"]) > options.drain_timeout_s + EXIT_TIMEOUT_S + 5


def test_shared_memory_holds_the_regions_of_three_models():
    assert SERVER["shm_size"] == "2gb"
    assert 3 * ServerOptions().shared_memory_bytes < 2 << 30


def test_the_server_gets_a_gpu_room_for_its_files_and_another_start():
    (gpu,) = SERVER["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["driver"] == "nvidia" and gpu["capabilities"] == ["gpu"] and gpu["count"] == 1
    assert SERVER["ulimits"]["memlock"] == -1 and SERVER["ulimits"]["nofile"] > 10_000
    assert SERVER["restart"] == "unless-stopped", "`inkling serve` ends when the server must be replaced"


def test_monitoring_is_asked_for_and_watches_the_server():
    for name in ("prometheus", "grafana"):
        assert COMPOSE["services"][name]["profiles"] == ["monitoring"]
    assert "profiles" not in SERVER
    (job,) = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = (target for group in job["static_configs"] for target in group["targets"])
    assert target.split(":") == ["inkling", str(ServerOptions().metrics_port)]
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_commands_and_settings_of_the_container_exist():
    entry = json.loads(named("ENTRYPOINT")[0])
    assert entry[1:] == ["inkling", "serve"]
    for command in ([*entry[2:], *SERVER["command"]], SERVER["healthcheck"]["test"][2:]):
        assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0, command
    assert SERVER["healthcheck"]["test"][:2] == ["CMD", "inkling"]
    settings = Settings.load(SERVER["environment"])
    assert settings.device == "cuda" and settings.load_timeout_s <= seconds(
        SERVER["healthcheck"]["start_period"]
    )


def test_bind_mounts_exist():
    sources = [
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert sources and not [source for source in sources if not (ROOT / source).exists()]


def test_volumes_are_declared_and_images_pinned():
    used = {v.split(":")[0] for s in COMPOSE["services"].values() for v in s["volumes"] if v[0].isalpha()}
    assert used == set(COMPOSE["volumes"])
    images = [s["image"] for s in COMPOSE["services"].values() if "build" not in s] + named("FROM")
    assert all(re.search(r":v?\d+\.\d+", image) for image in images), images


def test_the_dockerfile_keeps_the_rules():
    names = [name for name, _ in instructions()]
    known = {"FROM", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert names[0] == "FROM" and set(names) <= known, "ADD fetches; SHELL, ONBUILD and the like hide things"
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    for rest in named("ENTRYPOINT") + named("CMD"):
        assert isinstance(json.loads(rest), list), "a shell would not hand signals on"
    for rest in named("RUN"):
        assert "sudo" not in rest and not rest.startswith("cd ")
        assert all("--no-cache-dir" in part for part in rest.split("&&") if "pip install" in part)


def test_what_is_copied_exists_and_is_in_the_build_context():
    rules = [r for r in (ROOT / ".dockerignore").read_text().splitlines() if r and not r.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    for rest in named("COPY"):
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, rule) for rule in kept), f"{source} is not in the build context"


def test_the_image_pins_every_dependency_and_a_torch_that_takes_its_triton():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "deploy" / "requirements.txt").read_text().splitlines()
    pinned = {r.name: r for r in map(Requirement, (line for line in lines if line and line[0] != "#"))}
    versions = {name: str(r.specifier).removeprefix("==") for name, r in pinned.items()}
    assert all(str(r.specifier).startswith("==") for r in pinned.values())
    for needed in map(Requirement, project["dependencies"] + project["optional-dependencies"]["cuda"]):
        assert needed.specifier.contains(versions[needed.name]), needed
        assert needed.extras <= pinned[needed.name].extras, needed
    suite = (ROOT / "constraints.txt").read_text()
    for name in set(versions) - {"torch", "triton"}:  # of the GPU suite
        assert f"\n{name}=={versions[name]}\n" in suite, f"{name}: another version than the suite runs with"


def test_a_wheel_in_a_system_python_finds_its_model_repository(tmp_path, monkeypatch):
    """Debian's Python has the prefix /usr and installs below /usr/local."""
    monkeypatch.setattr(
        tritonserver, "__file__", str(tmp_path / "dist-packages" / "inkling" / "tritonserver.py")
    )
    monkeypatch.setattr(tritonserver.sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(ServerError, match="no model repository in "):
        tritonserver.model_repository()
    folder = tmp_path / "data" / "share" / "inkling-triton" / "model_repository"
    folder.mkdir(parents=True)
    assert tritonserver.model_repository() == folder
