"""The HuggingFace side: the network of the installed transformers, in plain float32.

    python -m ckptkit.verification.runners.torch JOB OUT

Every parameter that transformers builds goes by its own name; weights are not initialised, for all are loaded. What
does not live here: how a config.json is spelled (`spelling.py`), what the network reads of it (`torch_reading.py`),
what it gives inside (`torch_watch.py`).
Shapes: B one sequence, T tokens, V the vocabulary.
"""

from __future__ import annotations

import copy
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckptkit.errors import InternalError, UsageError
from ckptkit.verification.runners.computing import FORMATS
from ckptkit.verification.runners.devices import parse_device
from ckptkit.verification.runners.frameworks import framework
from ckptkit.verification.runners.job import Floats, Job
from ckptkit.verification.runners.main import main
from ckptkit.verification.runners.net import LAYER, WHOLE, Net, Tap, Walk, Watch
from ckptkit.verification.runners.pausing import Pause, paused
from ckptkit.verification.runners.spelling import spelled_for
from ckptkit.verification.runners.torch_reading import read_model
from ckptkit.verification.runners.torch_watch import Watcher

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
ROTARY = "model.rotary_emb."
INV_FREQ = f"{ROTARY}inv_freq"
EMBEDDING = "model.embed_tokens.weight"
# Of no effect on the logits: the dtype is float32 here, a padding id only keeps a gradient at zero, and what else
# the network returns is nobody's matter. A quantisation that is none is said as null.
_LEFT_OUT = (
    "dtype", "torch_dtype", "pad_token_id", "model_type", "_attn_implementation", "attn_implementation",
    "quantization_config", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript",
)  # fmt: skip
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is deterministic with a workspace of fixed size
}
# What transformers' own classes do with parameters in another dtype, release 4.57 and 5.
_KEPT = (
    "RMSNorm's mean and root, and what they scale: in float16 a square leaves the range at 256",
    "softmax, of attention's scores and of a router's",
    "rotary angles and their cosine and sine, which are rounded when they are multiplied",
    "sums inside of a matrix product, as far as the device has it so",
)


class TorchNet:
    """A transformers model as a `Net`. At most one copy of the model is in memory, on the device.

    `layers` are the numbers of those that the model has. Parameters have storage from when they are set until they are
    freed, but for those of `separate_experts`, which are views of stacked ones.
    """

    runner = "torch"
    takes_positions = True
    kept: Sequence[str] = _KEPT

    def __init__(
        self, torch: Any, model: Any, device: Any, shapes: Mapping[str, tuple[int, ...]], *,
        layers: Sequence[int], separate_experts: bool, streamed: bool, compute: str = "",
    ) -> None:  # fmt: skip
        self.versions: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []
        self.reading: dict[str, Any] = {}
        self._torch, self._model, self._device = torch, model, device
        self._layers, self._streamed, self._has_views = layers, streamed, separate_experts
        named = dict(model.named_parameters())
        parameters = {self._named(name): tensor for name, tensor in named.items()}
        self._parameters: dict[str, Any] = split_experts(parameters) if separate_experts else parameters
        whole = {self._named(name): shape for name, shape in shapes.items()}
        views = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        self._shapes = views if separate_experts else whole
        by_identity = {id(tensor): name for name, tensor in parameters.items()}
        self._twins = {
            name: by_identity[id(tensor)]
            for name, tensor in model.named_parameters(remove_duplicate=False)
            if name not in named
        }
        self._watcher = Watcher(torch, model, layers)
        self._low = getattr(torch, FORMATS[compute].name) if compute else None
        # Dynamic scaling computes its frequencies anew in every forward run.
        self._is_dynamic = "dynamic" in str(getattr(model.model.rotary_emb, "rope_type", ""))
        self.constants: Sequence[str] = () if self._is_dynamic else (INV_FREQ,)

    def _named(self, name: str) -> str:
        """Return a parameter's name in a checkpoint, which counts the layers that are left out too."""
        found = LAYER.search(name)
        if found is None:
            return name
        return f"{name[: found.start(1)]}{self._layers[int(found[1])]}{name[found.end(1) :]}"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def blocks(self) -> Sequence[tuple[str, Sequence[str]]]:
        if not self._streamed:
            return [(WHOLE, list(self._shapes))]
        names: dict[str, list[str]] = {"embedding": [EMBEDDING], **{f"layers.{i}": [] for i in self._layers}}
        for name in self._shapes:
            if found := LAYER.search(name):
                names[f"layers.{found[1]}"].append(name)
        others = [name for name in self._shapes if name != EMBEDDING and LAYER.search(name) is None]
        return [*names.items(), ("head", [*others, *([EMBEDDING] if self._twins else [])])]

    def free(self, names: Sequence[str]) -> None:
        for name in names if not self._has_views else ():
            self._parameters[name].data = self._torch.empty(0, device=self._device)

    def benign(self, name: str) -> str | None:
        return None

    def twin(self, name: str) -> str | None:
        return self._twins.get(name)

    def put(self, name: str, values: Floats) -> None:
        with self._torch.no_grad():
            if self._tensor(name).shape != values.shape:  # it was freed
                self._tensor(name).data = self._torch.empty(values.shape, device=self._device)
            self._tensor(name).copy_(self._torch.from_numpy(np.ascontiguousarray(values)))

    def get(self, name: str) -> Floats:
        values: Floats = np.array(self._tensor(name).detach().cpu().numpy())
        return values

    def _tensor(self, name: str) -> Any:
        return self._model.get_buffer(name) if name in self.constants else self._parameters[name]

    @contextmanager
    def lowered(self, names: Sequence[str]) -> Iterator[None]:
        # All that are set are those of the block. Each keeps its storage, so that views of it stay what they are.
        held = [(tensor, tensor.data) for tensor in self._model.parameters() if tensor.numel()]
        for tensor, data in held:
            tensor.data = data.to(self._low)
        try:
            yield
        finally:
            for tensor, data in held:
                tensor.data = data

    def walk(self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None) -> Walk:
        return self._walk(ids, positions, tap, None)

    def watched(
        self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None, watch: Watch, *, low: bool
    ) -> Walk:
        return self._walk(ids, positions, tap, watch)  # its dtype is that of the parameters

    def _walk(self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None, watch: Watch | None) -> Walk:
        if self._streamed:
            return paused(lambda pause: self._forward(ids, positions, tap, watch, pause))
        return self._at_once(ids, positions, tap, watch)

    def _at_once(
        self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None, watch: Watch | None
    ) -> Walk:
        yield WHOLE
        return self._forward(ids, positions, tap, watch, None)

    def _forward(
        self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None, watch: Watch | None,
        pause: Pause | None,
    ) -> Floats:  # fmt: skip
        torch = self._torch
        vocab = self.reading["vocab"]
        if outside := [i for i in ids if not 0 <= i < vocab]:
            raise UsageError(f"token id {outside[0]} is not in a vocabulary of {vocab}")
        if self._is_dynamic:  # it remembers the longest input, and would run a shorter one by its frequencies
            renew_rotary(self._model, self._device)
        ids_BT = torch.tensor([list(ids)], dtype=torch.long, device=self._device)
        positions_BT = None
        if positions is not None:
            positions_BT = torch.tensor([list(positions)], dtype=torch.long, device=self._device)
        with torch.no_grad(), self._watcher.watching(tap, pause, watch):
            logits_BTV = self._model(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),  # without it, a jump in positions means another sequence
                position_ids=positions_BT,
                use_cache=False,
            ).logits
        logits_TV: Floats = logits_BTV[0].float().cpu().numpy()
        return logits_TV


def build(job: Job) -> Net:
    """Return the network that transformers builds for the job's config.json, its weights not set.

    UsageError for what the network cannot be: other families, remote code, quantized weights, a layout of experts
    that the installed release does not have, a device that is not there.
    """
    refuse(job)
    kind, index = parse_device(job.device)
    os.environ.update(_ENVIRONMENT)
    torch, transformers = framework("torch"), framework("transformers")
    device = _device(torch, kind, index)
    if job.compute:
        _try_dtype(torch, device, job.compute)
    config, notes = spelled_for(job.config, transformers.__version__)
    model = _model(torch, transformers, config)
    stacked = any(name.endswith(".experts.gate_up_proj") for name, _ in model.named_parameters())
    if job.variant == "stacked" and not stacked and any(read_model(model)["sparse_layers"]):
        raise UsageError(
            f"transformers {transformers.__version__} has a tensor for each expert, and this checkpoint stacked ones",
            hint="`ckptkit convert` it to separate experts, or install transformers 5",
        )
    if job.stream and stacked and job.variant != "stacked":
        raise UsageError(
            f"transformers {transformers.__version__} stacks the experts that this checkpoint has apart",
            why="a layer of it cannot be loaded alone",
            hint="leave out `--stream`, or convert the checkpoint with `--to hf --variant stacked`",
        )
    separate = stacked and job.variant != "stacked"
    layers = tuple(range(len(model.model.layers)) if job.layers is None else job.layers)
    reading = read_model(model)
    if job.layers is not None:
        model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in layers])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    _materialise(torch, model, device, with_storage=separate)
    net = TorchNet(torch, model, device, shapes, layers=layers, separate_experts=separate, streamed=job.stream,
                   compute=job.compute)  # fmt: skip
    net.reading = reading
    net.settings = _be_exact(torch, device)
    net.notes = notes
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    net.versions = {**versions, "python": platform.python_version()}
    return net


def refuse(job: Job) -> None:
    """Raise UsageError for a config.json that no network here may be built from; no framework is needed for it."""
    config = job.config
    if job.dialect != "hf":
        raise UsageError(f"the torch runner reads tensors in HuggingFace naming, not in `{job.dialect}`")
    if config.get("auto_map"):
        raise UsageError(
            "config.json asks for code that comes with the checkpoint (`auto_map`)", why="ckptkit runs no such code"
        )
    if config.get("quantization_config"):
        raise UsageError("the weights are quantized (`quantization_config`)", why="a forward run here is in float32")
    if config.get("model_type") not in FAMILIES:
        raise UsageError(
            f"no forward run for `model_type` {config.get('model_type')!r}",
            why=f"there is one for {', '.join(FAMILIES)}",
        )
    for table in (config, config.get("rope_scaling"), config.get("rope_parameters")):
        if isinstance(table, Mapping) and table.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UsageError(
                "config.json rotates a part of each head (`partial_rotary_factor`), which no family here does"
            )


def _device(torch: Any, kind: str, index: int) -> Any:
    """Return the torch device; UsageError when it is not there."""
    if kind == "ascend":
        kind = "npu"
        framework("torch_npu")
    backend = getattr(torch, kind)
    if not backend.is_available() or index >= backend.device_count():
        raise UsageError(f"torch {torch.__version__} finds no device `{kind}:{index}` on this machine")
    return torch.device(kind, index)


def _try_dtype(torch: Any, device: Any, compute: str) -> None:
    """Raise UsageError when the device does not compute in a dtype."""
    try:
        one = torch.ones(2, 2, dtype=getattr(torch, FORMATS[compute].name), device=device)
        torch.nn.functional.softmax(torch.matmul(torch.nn.functional.linear(one, one), one), -1).sum().item()
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"torch {torch.__version__} does not compute in {compute} on `{device}`",
            why=str(error).strip().partition("\n")[0],
        ) from error


def _model(torch: Any, transformers: Any, config: dict[str, Any]) -> Any:
    """Return the model in float32, of shapes alone: no time and no memory go into random values."""
    settings = {key: value for key, value in copy.deepcopy(config).items() if key not in _LEFT_OUT}
    # transformers 5 checks types, and has an error of its own for a wrong one.
    wrong_type = getattr(framework("huggingface_hub.errors"), "StrictDataclassError", TypeError)
    try:
        if config["model_type"] == "mistral" and settings.get("head_dim") is None:
            # What its attention makes of none; transformers 4 stumbles over it where rotary positions are scaled.
            settings["head_dim"] = settings.get("hidden_size", 4096) // settings.get("num_attention_heads", 32)
        settled = transformers.AutoConfig.for_model(config["model_type"], **settings)
        settled._experts_implementation = "eager"  # one expert after another, where a release has faster ways
        with torch.device("meta"):  # shapes alone: no time goes into random values
            model = transformers.AutoModelForCausalLM.from_config(
                settled, attn_implementation="eager", trust_remote_code=False
            )
    except (KeyError, TypeError, ValueError, wrong_type) as error:
        raise UsageError(
            f"transformers {transformers.__version__} makes no network of this config.json",
            why=" ".join(str(error.args[0] if error.args else error).split()),
        ) from error
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _materialise(torch: Any, model: Any, device: Any, *, with_storage: bool) -> None:
    """Move a model of shapes alone to `device`, its buffers set; parameters get storage when they are set, or now."""
    for module in model.modules():  # one after another, so that a streamed model never has storage for all
        module.to_empty(device=device, recurse=False)
        for parameter in module.parameters(recurse=False):
            if not with_storage:
                parameter.data = torch.empty(0, device=device)
    model.tie_weights()
    renew_rotary(model, device)
    others = [name for name, _ in model.named_buffers() if not name.startswith(ROTARY)]
    if others or any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise InternalError("the network has buffers that nothing sets, or parameters not in float32", items=others)
    model.requires_grad_(False)


def renew_rotary(model: Any, device: Any) -> None:
    """Give the model a rotary embedding as new: frequencies of its config, no memory of earlier inputs."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)


def split_experts(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return views of each expert's own matrices where a network stacks them, in the names of a checkpoint that
    does not: `gate_up_proj`, (experts, gate rows then up rows, hidden), and `down_proj`, (experts, hidden, rows)."""
    views: dict[str, Any] = {}
    for name, tensor in parameters.items():
        prefix, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                rows = both.shape[0] // 2
                views[f"{prefix}.experts.{expert}.gate_proj.weight"] = both[:rows]
                views[f"{prefix}.experts.{expert}.up_proj.weight"] = both[rows:]
        elif last == "down_proj":
            views |= {f"{prefix}.experts.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            views[name] = tensor
    return views


def _be_exact(torch: Any, device: Any) -> dict[str, Any]:
    """Switch off all that would not be float32 arithmetic in one order; return what was set."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    if device.type == "npu":
        torch.npu.matmul.allow_hf32 = False
        torch.npu.conv.allow_hf32 = False
    return {
        "dtype": "float32",
        "attention": "eager",
        "dropout": "off",
        "cache": "off",
        "tf32": "off",
        "hf32": "off",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    sys.exit(main(build))
