# SPDX-License-Identifier: Apache-2.0
"""What the config.pbtxt files say, and whether they agree with each other. Reads configs only; starts nothing.

The files are the one place that says a tensor's name, type and shape, or a limit. Whoever needs to know reads them
through here, so a misspelt field is an error with its file and line, and two files that disagree are never served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from ensemble.errors import ConfigError

ENSEMBLE = "text_classifier"


def read_config(file: Path) -> Any:
    """One config.pbtxt as a ModelConfig message. Raises ConfigError with file, line and column."""
    try:
        return text_format.Parse(file.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing: restore it from the project") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error})") from error
    except text_format.ParseError as error:
        # The message begins "line:column : ...".
        raise ConfigError(f"{file}:{str(error).replace(' : ', ': ', 1).rstrip('.')}: correct it there") from error


def leads_away(name: str) -> bool:
    """Whether a name, put behind a folder, may mean something that is not in it."""
    return "/" in name or name in (".", "..")


@dataclass(frozen=True)
class Tensor:
    """One input or output of a model: its type by Triton's name, its dims without the batch dimension."""

    type: str
    dims: tuple[int, ...]
    ragged: bool


@dataclass(frozen=True)
class Contract:
    """The ensemble and its steps as one set of configs; `models` by name, the ensemble first."""

    repository: Path
    models: Mapping[str, Any]

    @classmethod
    def read(cls, repository: Path, config_name: str | None = None) -> Contract:
        """Read and check the configs that a server started with --model-config-name=config_name would use.

        Raises ConfigError with a line for each thing that is wrong.
        """
        ensemble = read_config(_config_file(repository / ENSEMBLE, config_name))
        models = {ENSEMBLE: ensemble}
        for step in ensemble.ensemble_scheduling.step:
            if leads_away(step.model_name):
                raise ConfigError(f"{ENSEMBLE}: step {step.model_name!r} is no model's name: correct it")
            models[step.model_name] = read_config(_config_file(repository / step.model_name, config_name))
        contract = cls(repository, models)
        if problems := list(contract._problems()):
            raise ConfigError("\n".join(problems))
        return contract

    @property
    def max_batch_size(self) -> int:
        """Rows of a batch: the same for every model."""
        return int(self.models[ENSEMBLE].max_batch_size)

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest row the tokenizer's config allows."""
        return _whole_number(self.models["tokenizer"], "max_sequence_length")

    def inputs(self, model: str) -> dict[str, Tensor]:
        """The inputs of a model by name."""
        return _tensors(self.models[model].input)

    def outputs(self, model: str) -> dict[str, Tensor]:
        """The outputs of a model by name."""
        return _tensors(self.models[model].output)

    def check_graph(self, inputs: Mapping[str, str], outputs: Mapping[str, str], *, every_input: bool = False) -> None:
        """Hold an exported graph against the classifier's config; names to Triton types. Raises ConfigError.

        every_input: the graph must take all that the config sends, as an engine must; the CPU handler sees to that
        itself.
        """
        config = self.models["classifier"]
        declared = {name: tensor.type for name, tensor in self.inputs("classifier").items()}
        declared |= {
            name: model_config_pb2.DataType.Name(entry.data_type)
            for entry in config.batch_input
            for name in entry.target_name
        }
        promised = {name: tensor.type for name, tensor in self.outputs("classifier").items()}
        wrong = {name: kind for name, kind in inputs.items() if declared.get(name) != kind}
        missing = declared.keys() - inputs.keys() if every_input else set()
        if wrong or missing or dict(outputs) != promised:
            raise ConfigError(
                f"the exported graph has inputs {dict(inputs)} and outputs {dict(outputs)}, the classifier's config "
                f"has {declared} and {promised}: make them agree"
            )

    def warm_up_problems(self, max_length: int) -> list[str]:
        """The classifier's warm-up samples that an engine for rows of max_length would refuse, a line each.

        Triton loads no model of which a sample fails.
        """
        return [
            f"classifier: model_warmup {sample.name!r} is {sample.batch_size} rows of {longest} tokens, the model "
            f"takes {self.max_batch_size} of {max_length}: shorten it, or export with a larger MAX_LENGTH"
            for sample in self.models["classifier"].model_warmup
            for longest in [max(dim for tensor in sample.inputs.values() for dim in tensor.dims)]
            if sample.batch_size > self.max_batch_size or longest > max_length
        ]

    def _problems(self) -> Iterator[str]:
        for name, config in self.models.items():
            yield from _problems_of_one(self.repository, name, config)
        ensemble = self.models[ENSEMBLE]
        for name, config in self.models.items():
            if config.max_batch_size != ensemble.max_batch_size:
                yield (
                    f"{name}: max_batch_size is {config.max_batch_size}, the ensemble's is {ensemble.max_batch_size}: "
                    "set the same in all of them"
                )
        yield from self._problems_of_edges()
        if "tokenizer" not in self.models:
            yield f"{ENSEMBLE}: no step is the tokenizer: restore its config from the project"
        else:
            yield from _problems_of_limits(self.models["tokenizer"])

    def _problems_of_edges(self) -> Iterator[str]:
        """Every tensor of the ensemble must mean the same at both ends."""
        ensemble = self.models[ENSEMBLE]
        known = self.inputs(ENSEMBLE)
        for step in ensemble.ensemble_scheduling.step:
            inputs, outputs = self.inputs(step.model_name), self.outputs(step.model_name)
            for key, value in step.input_map.items():
                yield from _mismatch(f"{step.model_name}: input {key}", inputs.get(key), value, known.get(value))
            for missing in inputs.keys() - step.input_map.keys():
                yield f"{step.model_name}: input {missing} is not mapped in {ENSEMBLE}: add an input_map for it"
            for key, value in step.output_map.items():
                if key not in outputs:
                    yield f"{ENSEMBLE} maps output {key} of {step.model_name}, which has none of that name: correct it"
                else:
                    known[value] = outputs[key]
        for name, tensor in self.outputs(ENSEMBLE).items():
            yield from _mismatch(f"{ENSEMBLE}: output {name}", tensor, name, known.get(name))


def _problems_of_one(repository: Path, name: str, config: Any) -> Iterator[str]:
    """What is wrong with one config by itself."""
    if config.name != name:
        yield f"{name}: name is {config.name!r}: set it to the folder's name"
    for file in _file_names(config):
        if leads_away(file):
            yield f"{name}: {file!r} leads out of the model's folder: give the name of a file in it"
    if not (repository / name / "1").is_dir():
        yield f"{name}: the version folder {name}/1 is missing: make it (git drops empty folders, so put a file in it)"
    if config.max_batch_size < 1:
        yield f"{name}: max_batch_size is {config.max_batch_size}: set it to at least 1, or nothing is batched"
    for tensor in [*config.input, *config.output]:
        if len(tensor.dims) != 1:
            yield (
                f"{name}: {tensor.name} has dims {list(tensor.dims)}: give the dims of one row, one number; "
                "max_batch_size already stands for the batch dimension"
            )
        if tensor.HasField("reshape"):
            yield f"{name}: {tensor.name} has a reshape, which an ensemble does not pass on: remove it"
    if config.platform != "ensemble" and not config.HasField("dynamic_batching"):
        yield f"{name}: dynamic_batching is missing, so every request would run alone: add dynamic_batching {{ }}"
    batching = config.dynamic_batching
    if batching.HasField("default_queue_policy") or batching.priority_queue_policy or batching.priority_levels:
        yield (
            f"{name}: dynamic_batching has a queue policy or priorities, with which requests wait up to half a second "
            "for a model that is free: remove it; max_waiting_rows of the tokenizer bounds the queue"
        )
    ragged_or_not = config.platform == "ensemble" or _parameter(config, "equal_lengths_only") == "true"
    for tensor in config.input:
        if -1 in tensor.dims and not (tensor.allow_ragged_batch or ragged_or_not):
            yield (
                f"{name}: input {tensor.name} varies in length and lacks allow_ragged_batch: requests of different "
                "length would never share a batch; add allow_ragged_batch: true"
            )
    if config.response_cache.enable:
        yield f"{name}: response_cache is not supported: remove it (equal texts are rare, and lengths are ragged)"
    if any(group.gpus for group in config.instance_group):
        yield f"{name}: instance_group names gpus, which other machines may not have: leave gpus out"
    if name == "classifier" and not 0 <= _whole_number(config, "attention_budget") < 10**18:
        yield (
            "classifier: parameter attention_budget must be a whole number of at most 18 digits, what rows x longest^2 "
            'of a batch may come to: set it ("4194304" is 16 rows of 512 tokens, "0" is no bound)'
        )
    if config.platform == "ensemble" and not any(output.label_filename for output in config.output):
        yield f'{name}: no output has label_filename, so clients get no labels: add label_filename: "labels.txt"'


def _file_names(config: Any) -> Iterator[str]:
    """Whatever Triton would look for by a path that begins in the model's folder."""
    yield from (config.default_model_filename, *config.cc_model_filenames.values())
    yield from (output.label_filename for output in config.output)
    yield from (entry.input_data_file for sample in config.model_warmup for entry in sample.inputs.values())
    yield from (_parameter(config, key) for key in ("EXECUTION_ENV_PATH", "TRITON_BATCH_STRATEGY_PATH"))


def _problems_of_limits(config: Any) -> Iterator[str]:
    """The tokenizer's parameters, by themselves and against each other."""
    least = {
        "max_sequence_length": 3,
        "max_text_bytes": 1,
        "max_request_bytes": max(1, _whole_number(config, "max_text_bytes")),  # or no text of that size can be sent
        "call_bytes": 1,
        "max_waiting_rows": 1,
        "ahead_rows": int(config.max_batch_size),  # or the classifier never gets a full batch
    }
    for key, value in least.items():
        if _whole_number(config, key) < value:
            yield f"tokenizer: parameter {key} must be a whole number of at least {value}"


def _mismatch(where: str, wanted: Tensor | None, edge: str, given: Tensor | None) -> Iterator[str]:
    if wanted is None:
        yield f"{where} is mapped in {ENSEMBLE}, but the model has none of that name: correct the name"
    elif given is None:
        yield f"{where} takes {edge!r}, which no earlier step gives: correct the name"
    elif (wanted.type, wanted.dims) != (given.type, given.dims):
        yield (
            f"{where} is {wanted.type} {list(wanted.dims)}, but {edge!r} is {given.type} {list(given.dims)}: "
            "make both the same"
        )


def _config_file(model: Path, config_name: str | None) -> Path:
    """The file Triton reads: configs/<name>.pbtxt where there is one, else config.pbtxt."""
    custom = model / "configs" / f"{config_name}.pbtxt"
    return custom if config_name and custom.is_file() else model / "config.pbtxt"


def _tensors(declared: Any) -> dict[str, Tensor]:
    return {
        tensor.name: Tensor(
            model_config_pb2.DataType.Name(tensor.data_type),
            tuple(tensor.dims),
            getattr(tensor, "allow_ragged_batch", False),
        )
        for tensor in declared
    }


def _parameter(config: Any, key: str) -> str:
    """A parameter's text, "" if there is none. (Reading a missing key of a protobuf map would add it.)"""
    return str(config.parameters[key].string_value) if key in config.parameters else ""


def _whole_number(config: Any, key: str) -> int:
    """A parameter as a whole number; -1 if it is none, which every check refuses."""
    text = _parameter(config, key)
    return int(text) if text.isascii() and text.isdigit() else -1
