"""The properties of each optimizer on which a run depends; importing this imports none of them."""

from __future__ import annotations

from bucketline.train.optim import OptimizerKind

ADAMW_BF16 = OptimizerKind(
    make="bucketline.train.optimizers.rounded_adamw:make_bf16", takes_bf16=True, takes_betas=True, shards=True
)
ADAMW_8BIT = OptimizerKind(make="bucketline.train.optimizers.adamw_8bit:make", takes_bf16=True, takes_betas=True)
ADAFACTOR = OptimizerKind(make="bucketline.train.optimizers.adafactor:make", learning_rate=1e-2)
MUON = OptimizerKind(make="bucketline.train.optimizers.muon:make", shards=True)
PRODIGY = OptimizerKind(
    make="bucketline.train.optimizers.prodigy:make", learning_rate=1.0, state=("d", "d_max", "d_numerator", "k")
)
SCHEDULE_FREE = OptimizerKind(
    make="bucketline.train.optimizers.schedule_free:make",
    average="bucketline.train.optimizers.schedule_free:OwnAverage",
    state=("k", "weight_sum", "lr_max"),
    shards=True,
)
