"""A rank of a sharded model without room for images: every rank leaves the model, and can use it as before."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from bucketline.loader import WeightedStore
from bucketline.store import Store
from bucketline.train.config import Objective
from bucketline.train.ema import Average
from bucketline.train.evaluation import drawing
from bucketline.train.evaluation.drawing import draw_images
from bucketline.train.evaluation.joint_pass import NoRoom, NoRoomElsewhere, attempt_jointly
from bucketline.train.noise import LatentScale, Prep, load_schedule
from bucketline.train.parallel import free_gathered, whole
from bucketline.train.sharding import tensors_of
from bucketline.train.step import Training
from tests.unit.train.forked import fork_ranks
from tests.unit.train.test_no_room_for_pictures import no_room
from tests.unit.train.test_sharding import CPU, predicted, sharded
from tests.unit.train.tiny_run import config, make_batch, write_unet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from bucketline.train.parallel import TrainRanks


@contextlib.contextmanager
def no_room_in(owner: object, name: str, *, call: int) -> Iterator[None]:
    """Let memory end in one call of a function, counted from 1."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, 1000))

    def failing(*args: object, **named: object) -> object:
        if next(calls) == call:
            no_room()
        return real(*args, **named)

    with mock.patch.object(owner, name, failing):
        yield


def places(model: Any) -> dict[str, tuple[tuple[object, str, int] | None, ...]]:
    """Return where memory ends on each of two ranks: object, function and call."""
    inside = (model.down_blocks[-1].resnets[0].conv1, "forward", 2)
    return {
        "in a block": (None, inside),
        "before the gathering": (None, (groups, "foreach_all_gather", 3)),
        "after the gathering": (None, (groups, "foreach_all_gather_copy_out", 3)),
        "after the last block": (None, (model.conv_out, "forward", 2)),
        "before the first block": ((model.time_embedding, "forward", 1), None),
        "in several places": ((groups, "foreach_all_gather_copy_out", 3), (groups, "foreach_all_gather", 3)),
    }


@pytest.mark.parametrize("keeps_gathered", [False, True])
def test_all_ranks_leave_a_model_that_one_has_no_room_for_and_use_it_again(tmp_path: Path, *, keeps_gathered: bool) -> None:
    def body(ranks: TrainRanks) -> None:
        signal.alarm(100)
        family, model = sharded("unet", tmp_path / "model", ranks, keeps_gathered=keeps_gathered)
        batch = make_batch()

        def drawn() -> Tensor:
            with torch.no_grad():
                found = torch.stack([predicted(family, model, batch) for _ in range(2)])
            free_gathered(model)  # as `averaged`
            return found

        def gradients() -> list[Tensor]:
            predicted(family, model, batch).square().mean().backward()  # type: ignore[no-untyped-call]
            found = [whole(p.grad) for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            return found

        expected, expected_gradients = drawn(), gradients()
        for name, of_ranks in list(places(model).items())[: 1 if keeps_gathered else None]:
            place = of_ranks[ranks.rank]
            with contextlib.nullcontext() if place is None else no_room_in(place[0], place[1], call=place[2]):
                found = attempt_jointly(model, drawn)
            assert isinstance(found, NoRoom), name
            assert isinstance(found, NoRoomElsewhere) is (place is None), name
            assert all(torch.equal(*pair) for pair in zip(gradients(), expected_gradients, strict=True)), name
            again = attempt_jointly(model, drawn)
            assert isinstance(again, torch.Tensor)
            assert torch.equal(again, expected), name

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)


def test_a_sharded_run_without_room_on_one_rank_has_no_images_and_the_same_weights(folder: Path) -> None:
    asked = config(folder, num_images=2, image_guidance=1.0)

    def training_of(ranks: TrainRanks) -> Training:
        family, model = sharded("unet", folder / "model", ranks)
        average = Average(model, 0.5)
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        schedule = load_schedule(folder / "model", CPU)
        return Training(
            config=asked,
            family=family,
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            average=average,
            prep=Prep(scale=LatentScale(scale=0.5, shift=0.25), schedule=schedule.noise, objective=Objective.EPSILON),
            autocast=torch.autocast("cpu", torch.bfloat16),
        )

    def body(ranks: TrainRanks) -> None:
        signal.alarm(100)
        training = training_of(ranks)
        before = {name: whole(tensor).clone() for name, tensor in tensors_of(training.model).items()}
        schedule = load_schedule(folder / "model", CPU)
        shares = [WeightedStore(store=Store.open(path)) for path in asked.store]

        def drawn() -> bool:
            path = folder / "images.png"
            return draw_images(training, schedule, shares, (), path, steps_done=2, keeps=ranks.is_main)

        model: nn.Module = training.model.conv_out  # type: ignore[assignment]
        place = no_room_in(model, "forward", call=2) if ranks.rank == 1 else contextlib.nullcontext()
        with place, mock.patch.object(drawing.log, "warning") as warning:
            assert not drawn()
        said = warning.call_args.args
        assert ("rank 1 has no more" in str(said[2])) is ranks.is_main
        assert all(torch.equal(whole(tensor), before[name]) for name, tensor in tensors_of(training.model).items())
        assert drawn() is ranks.is_main

    fork_ranks(folder, body)
