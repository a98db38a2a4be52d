"""The sections of a training config, their keys, defaults and single limits. The descriptions are what the docs say.

What does not live here: limits between keys (`config_checks.py`), reading the file (`config.py`), and which keys the
result depends on (`maths.py`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ckptkit.errors import UsageError
from ckptkit.quantities import parse_bytes
from ckptkit.train.config_checks import Contradictions, contradictions
from ckptkit.train.config_values import (
    DeviceSetting,
    LayersSetting,
    LossScaleSetting,
    PathSetting,
    PathsSetting,
    SizeSetting,
    TextsSetting,
)


class Section(BaseModel):
    """Keys of one section: no other key is allowed, a number in quotes is no number, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Where the first weights come from; the options of `convert` that say how to read them."""

    path: PathSetting = Field(description="the checkpoint to begin with: a HuggingFace or MindSpore folder, or a file")
    family: str | None = Field(default=None, description="family or alias (`llama2`); config.json decides without it")
    dialect: str | None = Field(
        default=None, description="naming of the weights: `hf`, `mindformers`; their names tell without it"
    )
    variant: str | None = Field(default=None, description="layout of fused tensors (`qkv_concat`)")
    strategy: PathSetting | None = Field(
        default=None, description="strategy file, or folder of them, of a sharded checkpoint"
    )
    step: int | None = Field(default=None, ge=0, description="the step to take when the ranks hold several")
    table: PathsSetting = Field(default=(), description="mapping tables beside those that are built in")
    config: PathSetting | None = Field(
        default=None, description="folder or config.json of the model, when none is beside it"
    )


class DataConfig(Section):
    """What is trained on, and how rows are made of it."""

    path: PathSetting = Field(description="the corpus: a JSONL file, or a MindRecord file")
    format: Literal["auto", "text", "prompt", "ids", "mindrecord"] = Field(
        default="auto", description="what a line holds"
    )
    seq_length: int = Field(ge=2, description="tokens of a row")
    packing: bool = Field(default=True, description="put several documents into a row")
    tokenizer: PathSetting | None = Field(
        default=None, description="tokenizer.json; that of the model's folder without it"
    )
    text_key: str = Field(default="text", min_length=1, description="key of the text in a line")
    prompt_key: str = Field(default="prompt", min_length=1, description="key of the prompt, which has no loss")
    response_key: str = Field(default="response", min_length=1, description="key of the response")
    ids_key: str = Field(default="input_ids", min_length=1, description="key of the token ids")
    eos: bool = Field(default=True, description="put the end token after each document")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the order")
    shuffle: bool = Field(
        default=True, description="permute the rows of every epoch; off, they come in the file's order"
    )


class OptimizerConfig(Section):
    """AdamW: decoupled weight decay, bias correction, no decay of norms and biases."""

    lr: float = Field(gt=0, description="highest learning rate, reached when the warm-up ends")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled decay of matrices, times the learning rate")
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest global norm of the gradient; null: no clipping"
    )
    freeze: TextsSetting = Field(
        default=(), description="patterns (`*`, `?`) of HuggingFace names that are not trained"
    )


class ScheduleConfig(Section):
    """The learning rate as a function of the step: see `schedule.py`."""

    kind: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how it falls after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps in which it rises")
    total_steps: int = Field(ge=1, description="steps of the whole schedule; the run ends there")
    min_lr: float = Field(default=0.0, ge=0, description="where it has fallen to at `total_steps`")


class AdaptiveConfig(Section):
    """Less memory a step when it runs short: see `adaptive.py`."""

    enabled: bool = Field(default=False, description="adapt recompute and micro-batch to the memory")
    limit: SizeSetting | None = Field(
        default=None, description="most memory of a step (`6GB`); 90 % of the machine's without it"
    )
    grow_below: float = Field(default=0.6, gt=0, lt=1, description="share of the limit below which steps are calm")
    patience: int = Field(default=20, ge=1, description="calm steps in a row before one notch is taken back")
    min_micro_batch: int = Field(default=1, ge=1, description="the micro-batch is never cut below this")

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes; None where the machine's counts."""
        return None if self.limit is None else parse_bytes(self.limit)


class TrainingConfig(Section):
    """Sizes, seeds and the device."""

    batch_size: int = Field(ge=1, description="rows of a global batch, which is one update")
    micro_batch: int = Field(
        default_factory=lambda data: data.get("batch_size", 1),
        ge=1,
        description="rows that go through the network at a time; divides `batch_size`, and is that without it",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of dropout")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of activations that is dropped")
    stop_at_step: int | None = Field(
        default=None, ge=0, description="save and end at this step; the schedule stays that of `total_steps`"
    )
    device: DeviceSetting = Field(default="cpu", description="`cpu`, `ascend`, or `ascend:1`")
    threads: int | None = Field(
        default=None, ge=1, description="threads of the CPU kernels; MindSpore's choice without it"
    )
    adaptive: AdaptiveConfig = Field(
        default_factory=AdaptiveConfig, description="less memory a step when it runs short"
    )


class PrecisionConfig(Section):
    """Precision of the blocks; norms, softmax, logits and loss are always fp32, and so are the stored weights."""

    compute: Literal["fp32", "fp16", "bf16"] = Field(default="fp32", description="dtype of the matrix products")
    loss_scale: LossScaleSetting = Field(default="dynamic", description="`dynamic`, or a number that stays (fp16)")
    initial_scale: float = Field(default=65536.0, ge=1, description="the dynamic loss scale at step 0 (fp16)")
    growth_interval: int = Field(
        default=1000, ge=1, description="updates without overflow before the scale doubles (fp16)"
    )
    ce_chunk: int = Field(default=1024, ge=1, description="tokens whose logits are in memory at a time")


class RecomputeConfig(Section):
    """Blocks whose activations are computed again in the backward pass instead of kept."""

    layers: LayersSetting = Field(default="none", description="`none`, `all`, or layers (`0-3,7`, both ends meant)")

    def selected(self, num_layers: int) -> frozenset[int]:
        """Return the layers of a model with `num_layers`; UsageError for a layer that it does not have."""
        if self.layers == "none":
            return frozenset()
        if self.layers == "all":
            return frozenset(range(num_layers))
        beyond = [str(layer) for layer in self.layers if int(layer) >= num_layers]
        if beyond:
            raise UsageError(
                f"`recompute.layers` names layer {beyond[0]}, and the model has {num_layers}",
                hint=f"layers are counted from 0: the last one is {num_layers - 1}",
            )
        return frozenset(map(int, self.layers))


class CheckpointConfig(Section):
    """Where checkpoints go, how often, and which are kept."""

    folder: PathSetting = Field(description="folder of the run: checkpoints are `step-00000008/` in it")
    every: int = Field(ge=1, description="steps between two checkpoints")
    keep_last: int = Field(default=2, ge=2, description="newest checkpoints that are kept")
    keep_best: bool = Field(default=False, description="keep the one with the lowest evaluation loss, too")
    background: bool = Field(default=True, description="write while training goes on")
    save_at_end: bool = Field(default=True, description="save at the last step, whatever `every` says")
    verify_on_load: bool = Field(
        default=True,
        description="compare every digest before a checkpoint is chosen, so that an older one is taken for one that is "
        "damaged; off, every tensor is compared all the same when it is loaded, and damage ends the run",
    )


class EvalConfig(Section):
    """The held-out set."""

    path: PathSetting | None = Field(default=None, description="held-out corpus, in the format of `data`")
    every: int | None = Field(default=None, ge=1, description="steps between two evaluations")
    batches: int | None = Field(default=None, ge=1, description="batches of one evaluation; all of them without it")
    at_start: bool = Field(default=False, description="evaluate before the first step, too")


class LogConfig(Section):
    """What is written down while it runs."""

    every: int = Field(default=1, ge=1, description="steps between two lines of the table and of TensorBoard")
    file: PathSetting | None = Field(
        default=None, description="JSONL, one line each step; `log.jsonl` of the run without it"
    )
    tensorboard: PathSetting | None = Field(default=None, description="folder of TensorBoard events; none without it")
    sample_ids: bool = Field(default=False, description="write the rows of each batch down, too")
    console: bool = Field(default=True, description="print the table")


class TrainConfig(Section):
    """A whole training config."""

    model: ModelConfig = Field(description="where the first weights come from")
    data: DataConfig = Field(description="what is trained on")
    optimizer: OptimizerConfig = Field(description="AdamW")
    schedule: ScheduleConfig = Field(description="the learning rate")
    training: TrainingConfig = Field(description="sizes, seeds and the device")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="dtypes and loss scale")
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig, description="less memory for more time")
    checkpoint: CheckpointConfig = Field(description="where checkpoints go")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="the held-out set")
    log: LogConfig = Field(default_factory=LogConfig, description="what is written down while it runs")

    @model_validator(mode="after")
    def _is_consistent(self) -> TrainConfig:
        found = contradictions(self)
        if found:
            raise Contradictions(found)
        return self
