"""The files of examples/deploy/ agree with each other and with `probemon serve`, which runs as they run it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import typer
import yaml

from probemon import bundled
from probemon.cli import app as cli
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.server.keys import read_keys
from probemon.ops.server.server import all_names, is_loopback
from test_locked_down_start import AS, NAMELESS, READ_ONLY, needs_mounts, needs_users, place  # noqa: F401

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/deploy"
CACHE, PORT = "/var/cache/probemon", 8321
SERVE = typer.main.get_command(cli.app).commands["serve"]


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def image():
    """Instructions of the Dockerfile, each with its arguments, in order."""
    lines = "\n".join(line for line in read("Dockerfile").splitlines() if not line.startswith("#"))
    return [line.strip().split(maxsplit=1) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]


def said(instruction):
    return [argument for name, argument in image() if name == instruction]


def unit():
    """Settings of the unit, each with its values."""
    found = {}
    for line in read("probemon.service").replace("\\\n", " ").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def image_environment():
    found = dict(part.split("=", 1) for line in said("ENV") for part in shlex.split(line))
    return {name: value for name, value in found.items() if CACHE in value}


COMPOSE = yaml.safe_load(read("compose.yaml"))
SERVICES = COMPOSE["services"]
DEPLOYED, SERVICE = yaml.safe_load_all(read("kubernetes.yaml"))
POD = DEPLOYED["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
PROGRAM, COMMAND, *OF_UNIT = shlex.split(unit()["ExecStart"][0])
ARGUMENTS = {
    "Dockerfile": json.loads(said("CMD")[-1]),
    "compose.yaml": SERVICES["probemon"]["command"],
    "kubernetes.yaml": CONTAINER["args"],
    "probemon.service": OF_UNIT,
}
GRACE = {  # seconds from SIGTERM to SIGKILL
    "compose.yaml": int(SERVICES["probemon"]["stop_grace_period"].removesuffix("s")),
    "kubernetes.yaml": POD["terminationGracePeriodSeconds"],
    "probemon.service": int(unit()["TimeoutStopSec"][0]),
    "Dockerfile": int(re.search(r"--stop-timeout (\d+)", read("Dockerfile"))[1]),
}
KEY_FILE = {  # where each puts the key
    "compose.yaml": Path("/run/secrets", *SERVICES["probemon"]["secrets"]),
    "kubernetes.yaml": Path({m["name"]: m["mountPath"] for m in CONTAINER["volumeMounts"]}["api-key"], "api-key"),
    "probemon.service": Path("%d", unit()["LoadCredential"][0].partition(":")[0]),
    "Dockerfile": None,  # PROBEMON_API_KEY
}
CALLED = {  # by clients, in addition to the address reached
    "compose.yaml": {"probemon", "localhost", "127.0.0.1"},
    "kubernetes.yaml": {SERVICE["metadata"]["name"], "localhost"},
    "probemon.service": {"localhost", "127.0.0.1"},
    "Dockerfile": {"localhost", "127.0.0.1"},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_serve(name):
    options = SERVE.make_context("serve", list(ARGUMENTS[name])).params
    assert options["model"] == "demo" and options["port"] == PORT
    assert options["drain_seconds"] + 5 < GRACE[name]
    assert options["api_key_file"] == KEY_FILE[name] and not options["api_key"] and not options["no_token"]
    assert options["allow_remote"] == (not is_loopback(options["host"])) == (name != "probemon.service")
    assert all_names(options["host"], options["allow_host"] or ()) - {"0.0.0.0", "[::1]"} == CALLED[name]


def test_image_is_built_from_files_and_versions_that_exist():
    for line in said("COPY"):
        if not line.startswith("--from"):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), source
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", " ".join(said("RUN")))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known) and f"'.[{extras}]'" in read("probemon.service")
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = [line.partition("=")[2] for line in said("ARG") if line.startswith("TORCH=")]
    assert f"torch=={torch}" in pinned
    assert json.loads(said("ENTRYPOINT")[0]) == ["probemon", "serve"] == [Path(PROGRAM).name, COMMAND]


def test_paths_and_users_agree_among_the_files():
    ours = {"HOME": CACHE, "XDG_CACHE_HOME": CACHE, "HF_HOME": f"{CACHE}/huggingface"}
    ours |= {"NUMBA_CACHE_DIR": f"{CACHE}/numba", "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor"}
    assert image_environment() == ours == dict(one.split("=") for one in unit()["Environment"])
    assert "environment" not in SERVICES["probemon"] and "env" not in CONTAINER  # they have the image's
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts["cache"] == CACHE and mounts["tmp"] == "/tmp" and said("VOLUME") == [CACHE]
    assert set(mounts) == {volume["name"] for volume in POD["volumes"]}
    assert SERVICES["probemon"]["volumes"] == [f"cache:{CACHE}"]
    assert [f"/var/cache/{name}" for name in unit()["CacheDirectory"]] == [CACHE]
    user, group = map(int, said("USER")[0].split(":"))
    security = POD["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (user, group, group)
    assert f"--uid {user} " in said("RUN")[-1] and user >= 10_000
    assert said("EXPOSE") == [str(PORT)] and CONTAINER["ports"][0]["containerPort"] == PORT
    assert SERVICES["probemon"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert f"http://127.0.0.1:{PORT}/healthz" in said("HEALTHCHECK")[0]
    assert SERVICE["spec"]["selector"] == DEPLOYED["spec"]["template"]["metadata"]["labels"]
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}


def test_nothing_but_the_named_folders_can_be_written():
    for name, service in SERVICES.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["tmpfs"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    security = CONTAINER["securityContext"]
    assert security["readOnlyRootFilesystem"] and POD["securityContext"]["runAsNonRoot"]
    assert security["capabilities"] == {"drop": ["ALL"]} and not security["allowPrivilegeEscalation"]
    settings = unit()
    assert settings["DynamicUser"] == ["yes"] and settings["ProtectSystem"] == ["strict"]


def test_compose_mounts_files_that_exist_at_the_paths_that_are_read():
    targets = set()
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            targets.add(target)
            assert (FOLDER / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"], volume
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
    build = SERVICES["probemon"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert context == ROOT and context / build["dockerfile"] == FOLDER / "Dockerfile"
    kept = [secret["file"] for secret in COMPOSE["secrets"].values()]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {str(Path("examples/deploy", file).parent) + "/" for file in kept} <= set(ignored)
    prometheus, (source,) = (
        yaml.safe_load(read("prometheus.yml")),
        yaml.safe_load(read("grafana-datasource.yml"))["datasources"],
    )
    (job,) = prometheus["scrape_configs"]
    assert job["job_name"] == "probemon" and set(prometheus["rule_files"]) <= targets
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    assert job["static_configs"] == [{"targets": [f"probemon:{PORT}"]}]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus" and source["isDefault"]
    (provider,) = yaml.safe_load(read("grafana-dashboards.yml"))["providers"]
    assert f"{provider['options']['path']}/probemon.json" in targets
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana-password"


def test_commands_of_compose_make_a_file_of_keys_of_which_prometheus_has_the_one_for_metrics(tmp_path):
    commands = [line[4:] for line in read("compose.yaml").splitlines() if line.startswith("#   ")]
    assert commands.pop() == "docker compose up --build"
    subprocess.run(["bash", "-euc", "\n".join(commands)], cwd=tmp_path, check=True)
    secrets = {file.name: file.read_text() for file in (tmp_path / "secrets").iterdir()}
    assert {f"./secrets/{name}" for name in secrets} >= {one["file"] for one in COMPOSE["secrets"].values()}
    client, prometheus = read_keys(secrets["keys"], "keys")
    assert (prometheus.secret, prometheus.roles) == (secrets["metrics-key"].strip(), {"metrics"})
    assert (client.secret, client.roles) == (secrets["client-key"].strip(), {"admin"})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="prometheus is not installed")
def test_prometheus_accepts_its_file(tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef")
    text = read("prometheus.yml").replace("/run/secrets/metrics-key", str(tmp_path / "key"))
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus", str(ROOT / "docs/operations")))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0 and "rules found" in done.stdout, done.stderr


def test_unit_reloads_a_deployment_file_of_the_package():
    settings = unit()
    assert settings["ExecReload"] == ["/bin/kill -HUP $MAINPID"] and settings["KillSignal"] == ["SIGTERM"]
    assert "--deployment" in OF_UNIT  # without one, SIGHUP ends the server
    (shown,) = re.findall(r"install -m 644 (examples/\S+\.yaml) ", read("probemon.service"))
    assert Deployment.read(ROOT / shown).sha256


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    copy = tmp_path / "probemon.service"
    copy.write_text(read("probemon.service").replace(PROGRAM, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- as it runs there ------------------------------------------------------------------------------------------------


def get(address, path, key=None, body=None):
    """Ask; return status and body."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@needs_users
@needs_mounts
def test_image_command_serves_as_a_nameless_user_with_a_read_only_root(place):  # noqa: F811
    demo = bundled.bundled_path()
    cache, temporary, key = place / "cache", place / "tmp", "0123456789abcdef"
    for folder in (cache, temporary, cache / "probemon"):
        folder.mkdir(mode=0o700)
    (cache / "probemon" / bundled.FOLDER).symlink_to(demo)  # else it would be fetched
    for folder in (cache, temporary, cache / "probemon"):
        os.chown(folder, NAMELESS, NAMELESS)
    (place / "key").write_text(key + "\n")
    environment = {name: value.replace(CACHE, str(cache)) for name, value in image_environment().items()}
    del environment["HOME"]  # not even this
    environment |= {"TMPDIR": str(temporary), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    writable = " && ".join(f"mount --bind {folder} {folder}" for folder in (cache, temporary))
    before = ["unshare", "-m", "bash", "-c", f'{writable} && {READ_ONLY} && exec "$@"', "-"]
    before += [*AS, f"--reuid={NAMELESS}", f"--regid={NAMELESS}", "env", "-i"]
    arguments = [*ARGUMENTS["Dockerfile"], "--port", "0", "--threads", "1", "--api-key-file", str(place / "key")]
    command = [*before, *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-m", "probemon"]
    with (place / "errors").open("w+") as errors:
        process = subprocess.Popen([*command, "serve", *arguments], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            line = process.stdout.readline()
            ready = re.fullmatch(r"probemon serving at http://0\.0\.0\.0:(\d+)/ with your API key\n", line)
            assert ready, (line, (place / "errors").read_text())
            address = f"http://localhost:{ready[1]}"
            assert get(address, "/healthz")[0] == get(address, "/readyz")[0] == 200
            _, program, *options = json.loads(said("HEALTHCHECK")[0].partition("CMD ")[2])
            assert program == "-c"
            healthy = [sys.executable, program, *(one.replace(str(PORT), ready[1]) for one in options)]
            assert subprocess.run(healthy).returncode == 0
            body = {"model": "demo", "messages": [{"role": "user", "content": "Tell me about whales."}]}
            body |= {"max_tokens": 4, "temperature": 0, "probemon": {}}
            assert get(address, "/v1/chat/completions", body=body)[0] == get(address, "/metrics")[0] == 401
            status, content = get(address, "/v1/chat/completions", key, body)
            tokens = json.loads(content)["choices"][0]["message"]["probemon"]["tokens"]
            assert status == 200 and len(tokens) == 4 and all(token["top"] for token in tokens[:-1])
            assert b'probemon_tokens_total{phase="generated",unseen=""}' in get(address, "/metrics", key)[1]
            assert Path(f"/proc/{process.pid}/status").read_text().split("Uid:")[1].split()[0] == str(NAMELESS)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        assert (out, errors.read()) == ("", "")
    assert process.returncode == int(unit()["SuccessExitStatus"][0])
    assert list((cache / "numba").rglob("*.nbc")) and list(temporary.glob("probemon-*")) == []
