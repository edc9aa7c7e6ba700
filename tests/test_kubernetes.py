# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes and deploy/kserve, without a cluster: valid by Kubernetes' own schemas, and true of this project."""

from __future__ import annotations

import argparse
import copy
import re
import urllib.request
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT
from container_files import arguments_of, compose

from ensemble import probe, serve
from ensemble.contract import Contract
from ensemble.launcher.options import SHM_BYTES
from ensemble.launcher.server import START_SECONDS, STOP_SECONDS, Server
from ensemble.serve import FIRST_ANSWER_SECONDS

FOLDER = ROOT / "deploy/kubernetes"
ADAPTER = FOLDER / "adapter/values.yaml"
MANIFESTS = sorted(set(FOLDER.rglob("*.yaml")) - {ADAPTER})
# The oldest release that the schemas and the manifests agree on, and the newest there is.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def read(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def manifest(name: str) -> dict[str, Any]:
    return read(FOLDER / f"{name}.yaml")


POD = manifest("deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def parsed(command: list[str], module: ModuleType) -> argparse.Namespace:
    """What the project's own parser makes of a command."""
    assert command[:4] == ["python3", "-m", "ensemble", module.__name__.removeprefix("ensemble.")]
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    return parser.parse_args(command[4:])


def mounts() -> dict[str, dict[str, Any]]:
    """Path -> how it is mounted, with its volume."""
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    return {mount["mountPath"]: {**volumes[mount["name"]], **mount} for mount in CONTAINER["volumeMounts"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_a_manifest_is_valid(file: Path, version: str) -> None:
    """Strictly: a field that Kubernetes does not know is an error."""
    kubernetes_validate.validate(read(file), version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_misspelt_field_would_be_seen(version: str) -> None:
    """Deep inside the pod, too."""
    wrong = copy.deepcopy(manifest("deployment"))
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readonlyRootFilesystem"] = True

    with pytest.raises(kubernetes_validate.ValidationError, match="readonlyRootFilesystem"):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_pod_runs_what_the_image_runs() -> None:
    """The image's command with an engine and a key asked for, behind NVIDIA's entrypoint, as the image's user."""
    (command,) = arguments_of("serve", "CMD")
    (user,) = arguments_of("serve", "USER")
    (exposed,) = arguments_of("serve", "EXPOSE")
    in_image, args = parsed(yaml.safe_load(command), serve), parsed(CONTAINER["args"], serve)

    assert "command" not in CONTAINER
    assert vars(args) == {**vars(in_image), "classifier": "tensorrt", "admin_key_file": args.admin_key_file}
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": args.http_port, "grpc": args.grpc_port, "metrics": args.metrics_port}
    assert sorted(map(str, ports.values())) == sorted(exposed.split())
    context = POD["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert context["fsGroup"] == context["runAsGroup"]  # or it could not read the key


@pytest.mark.parametrize("name", ["deployment", "loader/pod"])
def test_a_pod_can_do_little(name: str) -> None:
    """Pod Security's profile `restricted`, and more: no token, nothing of the image can be written."""
    spec = manifest(name)["spec"]
    pod = spec.get("template", {"spec": spec})["spec"]
    (container,) = pod["containers"]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_the_repository_and_the_key_are_read_only_where_the_server_looks() -> None:
    """What can be written is /tmp, and /dev/shm with room for every model's instances, as in compose.yaml."""
    args = parsed(CONTAINER["args"], serve)
    workdir = Path(arguments_of("serve", "WORKDIR")[-1])
    instances = 2  # the tokenizer's; and, were it the baseline, the classifier's
    shm = mounts()["/dev/shm"]["emptyDir"]

    assert {path for path, mount in mounts().items() if not mount.get("readOnly")} == {"/tmp", "/dev/shm"}
    assert (
        mounts()[str(workdir / args.repository)]["persistentVolumeClaim"]["claimName"]
        == (manifest("claim")["metadata"]["name"])
    )
    assert "secret" in mounts()[str(args.admin_key_file.parent)]
    assert f"--from-file={args.admin_key_file.name}=" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert shm["medium"] == "Memory"
    assert bytes_of(shm["sizeLimit"]) == int(compose()["serve"]["shm_size"].removesuffix("mb")) * 2**20
    assert bytes_of(shm["sizeLimit"]) >= instances * SHM_BYTES


def bytes_of(quantity: str) -> Fraction:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()
    return Fraction(number) * 2 ** {"Ki": 10, "Mi": 20, "Gi": 30}[unit]


def test_a_server_can_end_in_order() -> None:
    """The grace period begins with preStop, and holds the launcher's own end."""
    command = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]

    assert command[0] == "sleep"
    assert POD["terminationGracePeriodSeconds"] > int(command[1]) + STOP_SECONDS


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_is_a_classification_and_may_say_why_it_failed(name: str) -> None:
    """It ends before Kubernetes ends it, on the port the server listens on."""
    check = CONTAINER[name]
    args = parsed(check["exec"]["command"], probe)

    assert args.deadline_seconds < check["timeoutSeconds"]
    assert args.url == f"127.0.0.1:{parsed(CONTAINER['args'], serve).grpc_port}"


def test_a_server_is_given_time_to_start_and_to_heal() -> None:
    """It is taken out of the service long before it is killed."""
    seconds = {name: CONTAINER[name]["periodSeconds"] * CONTAINER[name]["failureThreshold"] for name in PROBES}

    assert seconds["startupProbe"] >= START_SECONDS + FIRST_ANSWER_SECONDS
    assert seconds["livenessProbe"] >= 4 * seconds["readinessProbe"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("service", ("selector",)),
        ("disruption-budget", ("selector", "matchLabels")),
        ("network-policy", ("podSelector", "matchLabels")),
        ("deployment", ("selector", "matchLabels")),
    ],
)
def test_everything_is_about_these_pods(name: str, path: tuple[str, ...]) -> None:
    """Each by the label that the Deployment gives them."""
    found = manifest(name)["spec"]
    for key in path:
        found = found[key]

    assert found == manifest("deployment")["spec"]["template"]["metadata"]["labels"]


def test_ports_are_named_as_the_pod_names_them() -> None:
    """And the service has each under its number; what is scraped is the metrics' port."""
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    service = manifest("service")["spec"]
    allowed = {port["port"] for rule in manifest("network-policy")["spec"]["ingress"] for port in rule["ports"]}
    annotations = manifest("deployment")["spec"]["template"]["metadata"]["annotations"]

    assert service["clusterIP"] == "None"
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    assert allowed == ports.keys()
    assert annotations["prometheus.io/port"] == str(ports["metrics"])


def test_the_autoscaler_goes_by_a_metric_that_there_is(server: Server) -> None:
    """By the adapter's name for it, out of a counter that the server has for the ensemble, up to a busy classifier."""
    (metric,) = manifest("autoscaler")["spec"]["metrics"]
    (rule,) = read(ADAPTER)["rules"]["custom"]
    series, model = re.match(r'(\w+)\{model="(\w+)",', rule["seriesQuery"]).groups()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        page = response.read().decode()

    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert f'model="{model}"' in rule["metricsQuery"]
    assert re.search(rf'^{series}\{{model="{model}",', page, re.MULTILINE)
    ahead = Contract.read(ROOT / "model_repository").models["tokenizer"].parameters["ahead_rows"].string_value
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": ahead}
    assert manifest("autoscaler")["spec"]["scaleTargetRef"]["name"] == manifest("deployment")["metadata"]["name"]


def test_kserve_runs_the_same_pod() -> None:
    """But for the names that KServe asks for. Its own fields are not held against its schema, which no package brings."""
    service = read(ROOT / "deploy/kserve/inferenceservice.yaml")
    pod = {k: v for k, v in service["spec"]["predictor"].items() if k not in ("minReplicas", "maxReplicas")}
    annotations = pod.pop("annotations")

    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "spec": pod}, VERSIONS[-1], strict=True)
    pod["topologySpreadConstraints"][0]["labelSelector"] = POD["topologySpreadConstraints"][0]["labelSelector"]
    pod["containers"][0]["name"] = CONTAINER["name"]
    for port in pod["containers"][0]["ports"]:
        assert port.pop("protocol") == "TCP"  # the key that KServe merges by
    assert pod == POD
    assert annotations == manifest("deployment")["spec"]["template"]["metadata"]["annotations"]
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    bounds = manifest("autoscaler")["spec"]
    assert service["spec"]["predictor"]["minReplicas"] == bounds["minReplicas"]
    assert service["spec"]["predictor"]["maxReplicas"] == bounds["maxReplicas"]


def patched(node: Any, patch: Any) -> Any:
    """Kubernetes' strategic merge, as far as a pod needs it: lists of objects are merged by name or path."""
    if isinstance(patch, dict) and isinstance(node, dict):
        return {**node, **{key: patched(node.get(key), value) for key, value in patch.items()}}
    if isinstance(patch, list) and isinstance(patch[0], dict):
        key = "mountPath" if "mountPath" in patch[0] else "name"
        mine = {each[key]: each for each in patch}
        kept = [patched(each, mine.pop(each[key], each)) for each in node or []]
        return [*kept, *mine.values()]
    return patch


@pytest.mark.parametrize("version", VERSIONS)
def test_with_tls_a_pod_serves_and_probes_with_files_that_it_has(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """deploy/tls/kubernetes.yaml over the Deployment: valid, and the same but for the files of TLS."""
    with_tls = patched(manifest("deployment"), read(ROOT / "deploy/tls/kubernetes.yaml"))
    kubernetes_validate.validate(with_tls, version, strict=True)
    pod = with_tls["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    before = len(CONTAINER["args"])
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    args, check = parsed(container["args"], serve), parsed(container["readinessProbe"]["exec"]["command"], probe)

    assert container["args"][:before] == CONTAINER["args"]
    assert all(argument.startswith("--tls-") for argument in container["args"][before:])
    assert {key: value for key, value in container.items() if key not in ("args", "env", "volumeMounts")} == {
        key: value for key, value in CONTAINER.items() if key not in ("args", "volumeMounts")
    }
    (mount,) = [mount for mount in container["volumeMounts"] if mount not in CONTAINER["volumeMounts"]]
    (volume,) = [volume for volume in pod["volumes"] if volume not in POD["volumes"]]
    assert mount["readOnly"] and mount["name"] == volume["name"] and "secret" in volume
    files = {args.tls_certificate, args.tls_key, args.tls_client_ca}
    assert args.tls_client_ca == check.root_certificates
    files |= {check.certificate_chain, check.private_key}
    assert {str(file.parent) for file in files} == {mount["mountPath"]} and len(files) == 5


def test_the_readme_names_files_that_there_are() -> None:
    """Of this folder and its neighbour."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.-])((?:deploy/kubernetes/|\.\./)?[\w/-]+\.yaml)", text))

    assert {file.relative_to(FOLDER).as_posix() for file in [*MANIFESTS, ADAPTER]} <= named
    assert all((FOLDER / name).is_file() or (ROOT / name).is_file() for name in named)
