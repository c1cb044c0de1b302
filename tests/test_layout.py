"""Layout: its text form, its sizes, and the message of every rule about them."""

import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.layout import PRESETS, Layout, ModelShape, unsized

pytestmark = pytest.mark.quick

SIZES = st.integers(1, 10)  # six of them make at most 2**20 ranks
ORDERS = st.one_of(
    st.sampled_from(["cluster", "spread"]), st.permutations(["pp", "dp", "fsdp", "cp", "tp"]).map(".".join)
)
LAYOUTS = st.builds(
    Layout,
    pipeline=SIZES,
    replicate=SIZES,
    shard=SIZES,
    expert=SIZES,
    context=SIZES,
    tensor=SIZES,
    zero=st.integers(1, 3),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"]),
    stages=st.integers(1, 4),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from(
        ["none", "activations", "optimizer", "optimizer-disk", "parameters", "activations+optimizer"]
    ),
    attention=st.sampled_from(["ulysses", "ring"]),
    order=ORDERS,
)


def of_its_axes(layout: Layout) -> Layout:
    """The layout without the options of pipelines where it has none, which its text can't have."""
    plain = Layout()
    if layout.pipeline == 1:
        return replace(layout, schedule=plain.schedule, stages=plain.stages)
    return layout


def message(action: Callable[[], Any]) -> str:
    """The message of the LayoutError that an action raises, which is one line."""
    with pytest.raises(LayoutError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(LAYOUTS.map(of_its_axes))
def test_text_reads_back_to_the_same_layout(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(str(layout), layout.size) == layout
    assert not unsized(str(layout))


@given(st.permutations(["pp2", "dp3", "zero2x4", "ep7", "cp5", "tp6", "recompute=full", "stages=2"]))
def test_parts_may_stand_in_any_order(parts: list[str]) -> None:
    assert Layout.parse(" ".join(parts)) == Layout(
        pipeline=2, replicate=3, shard=4, zero=2, expert=7, context=5, tensor=6, recompute="full", stages=2
    )


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("", Layout()),
        ("dp2", Layout(replicate=2)),
        ("fsdp4", Layout(shard=4, zero=3)),
        ("zero1x4", Layout(shard=4, zero=1)),
        ("zero2x4", Layout(shard=4, zero=2)),
        ("zero3x4", Layout(shard=4, zero=3)),
        ("fsdp1", Layout()),  # nothing to shard over
        ("dp1 tp1", Layout()),
        ("dp2 tp2", Layout(replicate=2, tensor=2)),
        ("pp2 dp2 tp2", Layout(pipeline=2, replicate=2, tensor=2)),
        ("cp2 offload=activations", Layout(context=2, offload="activations")),
        ("pp2 dp2 order=cluster", Layout(pipeline=2, replicate=2, order="dp.fsdp.pp.cp.tp")),
        ("pp2 dp2 order=spread", Layout(pipeline=2, replicate=2, order="cp.tp.pp.dp.fsdp")),
        ("pp2 schedule=interleaved-1f1b stages=2", Layout(pipeline=2, schedule="interleaved-1f1b", stages=2)),
    ],
)
def test_each_part_sets_its_axis(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


@pytest.mark.parametrize(
    ("text", "processes", "layout"),
    [
        ("single", 1, Layout()),
        ("ddp", 4, Layout(replicate=4)),
        ("fsdp", 4, Layout(shard=4, zero=3)),
        ("zero1", 4, Layout(shard=4, zero=1)),
        ("zero2", 4, Layout(shard=4, zero=2)),
        ("zero3", 4, Layout(shard=4, zero=3)),
        ("hsdp", 8, Layout(replicate=2, shard=4, zero=3)),
        ("3d", 8, Layout(pipeline=2, replicate=2, tensor=2)),
        ("3d", 4, Layout(pipeline=2, tensor=2)),
        ("ddp", 1, Layout()),
        ("zero1", 1, Layout()),
        ("ddp tp2", 6, Layout(replicate=3, tensor=2)),
        ("zero2 tp2 recompute=full", 8, Layout(shard=4, zero=2, tensor=2, recompute="full")),
        ("dp tp2", 8, Layout(replicate=4, tensor=2)),
        ("pp tp2", 8, Layout(pipeline=4, tensor=2)),
    ],
)
def test_a_part_without_size_takes_the_processes_left_over(text: str, processes: int, layout: Layout) -> None:
    assert Layout.parse(text, processes) == layout


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fills_eight_processes_or_is_of_one(preset: str) -> None:
    assert Layout.parse(preset, 8 if unsized(preset) else 1).size == (8 if unsized(preset) else 1)


@given(sizes=st.tuples(*[st.integers(1, 8)] * 4), left=st.integers(1, 16))
def test_a_filled_layout_uses_every_process(sizes: tuple[int, int, int, int], left: int) -> None:
    pipeline, shard, context, tensor = sizes
    processes = pipeline * shard * context * tensor * left
    layout = Layout.parse(f"pp{pipeline} dp fsdp{shard} cp{context} tp{tensor}", processes)
    assert (layout.size, layout.replicate) == (processes, left)


@given(st.tuples(*[st.integers(1, 3)] * 6))
def test_the_mesh_is_outermost_first_and_holds_every_process(sizes: tuple[int, int, int, int, int, int]) -> None:
    names = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
    layout = Layout(**dict(zip(names, sizes, strict=True)), zero=3)
    assert layout.mesh_shape() == sizes
    # Counted one by one: the places of the mesh, and those that differ in replicate, shard or expert.
    places = list(itertools.product(*map(range, sizes)))
    assert layout.size == len(places)
    assert layout.data_ranks == len({place[1:4] for place in places})
    varying = [len({place[axis] for place in places}) > 1 for axis in range(6)]
    assert layout.split_axes() == tuple(itertools.compress(names, varying))


UNKNOWN = "write parts such as pp2 dp2 fsdp2 ep2 cp2 tp2 zero1x4, or one of " + ", ".join(PRESETS)


@pytest.mark.parametrize(
    ("text", "processes", "expected"),
    [
        ("xp2", None, f'layout "xp2": "xp2" is not a part of a layout; {UNKNOWN}'),
        ("dp2 ddp4", None, f'layout "dp2 ddp4": "ddp4" is not a part of a layout; did you mean "dp4"? {UNKNOWN}'),
        ("fsp2", None, f'layout "fsp2": "fsp2" is not a part of a layout; did you mean "fsdp2"? {UNKNOWN}'),
        ("zero4x2", None, f'layout "zero4x2": "zero4x2" is not a part of a layout; {UNKNOWN}'),
        ("dp-2", None, f'layout "dp-2": "dp-2" is not a part of a layout; {UNKNOWN}'),
        ("dp0", None, 'layout "dp0": "dp0" has size 0; it must be a whole number from 1 to 1,048,576'),
        ("zero1x0", None, 'layout "zero1x0": "zero1x0" has size 0; it must be a whole number from 1 to 1,048,576'),
        ("dp2 tp2 dp3", None, 'layout "dp2 tp2 dp3": dp (replicate) is given twice; give it once'),
        ("ddp dp2", 2, 'layout "ddp dp2": dp (replicate) is given twice; give it once'),
        (
            "fsdp2 zero1x2",
            None,
            'layout "fsdp2 zero1x2": fsdp (shard) is given twice; give it once '
            "(zero and fsdp are two ways to write it)",
        ),
        (
            "recompute=full recompute=none",
            None,
            'layout "recompute=full recompute=none": recompute= is given twice; give it once',
        ),
        (
            "schedule=gpype",
            None,
            'layout "schedule=gpype": schedule=gpype; it can be gpipe, 1f1b, interleaved-1f1b, '
            "interleaved-zero-bubble, zbv-zero-bubble",
        ),
        ("recompute=", None, 'layout "recompute=": recompute=; it can be none, selective, full'),
        (
            "offload=disk",
            None,
            'layout "offload=disk": offload=disk; it can be none, activations, optimizer, optimizer-disk, '
            "parameters, parameters-disk",
        ),
        (
            "dp2 stages=2",
            None,
            'layout "dp2 stages=2": stages=2 is of pp (pipeline), and the layout has none; write such as pp2 beside '
            "it, or leave stages= out",
        ),
        (
            "ddp schedule=gpipe",
            2,
            'layout "ddp schedule=gpipe": schedule=gpipe is of pp (pipeline), and the layout has none; write such as '
            "pp2 beside it, or leave schedule= out",
        ),
        ("stages=0", None, 'layout "stages=0": stages=0; it must be a whole number from 1 to 10,000'),
        ("stages=two", None, 'layout "stages=two": stages=two; it must be a whole number from 1 to 10,000'),
        (
            "zero=1",
            None,
            'layout "zero=1": no option "zero"; '
            "there are stages, order, schedule, recompute, offload, sequence, attention, balance",
        ),
        (
            "ddp",
            None,
            'layout "ddp": dp (replicate) has no size and the number of processes is not known; '
            "write a size, such as dp2, or give the number of processes",
        ),
        (
            "dp fsdp",
            4,
            'layout "dp fsdp": dp (replicate) and fsdp (shard) both have no size; '
            "give one of them a size, such as fsdp2",
        ),
        (
            "3d",
            6,
            'layout "3d" was given 6 processes, which is no multiple of the 4 that its sized parts take; use '
            "4, 8 or 12",
        ),
        ("ddp", 0, 'layout "ddp" was given 0 processes; use 1, 2 or 3'),
        ("dp8", 4, 'layout "dp8" needs 8 processes, not 4; "dp4" would use 4 processes'),
        ("pp2 dp2", 6, 'layout "pp2 dp2" needs 4 processes, not 6; "pp2 dp3" would use 6 processes'),
        ("tp8", 4, 'layout "tp8" needs 8 processes, not 4; ask for 8 processes'),
        ("dp2", 1, 'layout "dp2" needs 2 processes, not 1; "single" would use 1 process'),
        ("single", 4, 'layout "single" needs 1 process, not 4; "dp4" would use 4 processes'),
        ("dp2", 0, 'layout "dp2" needs 2 processes, not 0; ask for 2 processes'),
    ],
)
def test_a_wrong_text_or_number_of_processes_is_refused_with_what_would_do(
    text: str, processes: int | None, expected: str
) -> None:
    assert message(lambda: Layout.parse(text, processes)) == expected


PARTS = ["dp2", "dp", "fsdp2", "zero1x", "tp2", "tp3", "cp4", "pp1", "ddp", "3d", "stages=2", "=", "x", "zero2x２"]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PARTS)).map(" ".join)))
def test_any_text_is_read_as_a_layout_of_these_processes_or_refused(text: str) -> None:
    with contextlib.suppress(LayoutError):
        assert Layout.parse(text, 4).size == 4


def test_a_size_too_long_for_a_number_is_refused() -> None:
    assert "has 5,002 characters; use 400 or fewer" in message(lambda: Layout.parse("dp" + "9" * 5000))
    for digits in ("9" * 10, "9" * 300, "1048577"):
        assert "it must be a whole number from 1 to 1,048,576" in message(lambda: Layout.parse(f"dp{digits}"))  # noqa: B023
        assert "it must be a whole number from 1 to 10,000" in message(lambda: Layout.parse(f"stages={digits}"))  # noqa: B023
    assert "is not a part of a layout" in message(lambda: Layout.parse("dp２"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tensor": 0}, "layout: tensor is 0; it must be 1 or more"),
        ({"pipeline": -1}, "layout: pipeline is -1; it must be 1 or more"),
        ({"stages": 0}, "layout: stages is 0; it must be 1 or more"),
        ({"shard": 2}, "layout: shard is 2 and zero is 0; zero must be 1, 2 or 3"),
        ({"shard": 2, "zero": 4}, "layout: zero is 4; it can be 0, 1, 2 or 3"),
        ({"zero": -1}, "layout: zero is -1; it can be 0, 1, 2 or 3"),
        ({"recompute": "some"}, "layout: recompute is 'some'; it can be none, selective, full"),
        (
            {"order": "near"},
            "layout: order is 'near'; it can be cluster, spread, or name each of pp, dp, fsdp, cp, tp once, "
            "outermost first, such as pp.dp.fsdp.cp.tp",
        ),
    ],
)
def test_a_wrong_value_in_python_is_refused_too(values: dict[str, Any], expected: str) -> None:
    assert message(lambda: Layout(**values)) == expected


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (
            Layout(tensor=3),
            ModelShape(heads=8),
            'layout "tp3": 8 attention heads are not divisible by 3; use tp1, tp2, tp4 or tp8',
        ),
        (
            Layout(tensor=4),  # key-value heads need not divide: ranks share them
            ModelShape(heads=6, key_value_heads=2),
            'layout "tp4": 6 attention heads are not divisible by 4; use tp1, tp2, tp3 or tp6',
        ),
        (
            Layout(tensor=11),  # of 60 sizes, the six nearest
            ModelShape(heads=5040),
            'layout "tp11": 5040 attention heads are not divisible by 11; use tp7, tp8, tp9, tp10, tp12 or tp14',
        ),
        (
            Layout(pipeline=4, stages=2),
            ModelShape(layers=6),
            'layout "pp4 stages=2": 8 pipeline stages for 6 layers; use 6 stages or fewer',
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_sizes_that_would_do(
    layout: Layout, shape: ModelShape, expected: str
) -> None:
    assert message(lambda: layout.check_model(shape)) == expected


@given(tensor=st.integers(1, 12), heads=st.integers(1, 64), groups=st.integers(1, 64))
def test_the_tensor_sizes_proposed_are_accepted(tensor: int, heads: int, groups: int) -> None:
    shape = ModelShape(heads=heads, key_value_heads=groups)
    try:
        Layout(tensor=tensor).check_model(shape)
    except LayoutError as error:
        assert heads % tensor
        proposed = re.findall(r"tp(\d+)", str(error).partition(";")[2])
        assert proposed
        for size in proposed:
            Layout(tensor=int(size)).check_model(shape)
    else:
        assert heads % tensor == 0


def test_a_model_without_sizes_fits_every_layout() -> None:
    Layout(pipeline=3, context=5, tensor=7).check_model(ModelShape())


def test_a_batch_smaller_than_the_data_ranks_is_refused() -> None:
    layout = Layout(replicate=2, shard=2, zero=1, tensor=8)
    layout.check_batch(4, None)
    assert message(lambda: layout.check_batch(3, None)) == (
        'layout "dp2 zero1x2 tp8": a batch of 3 leaves some of its 4 data ranks without a sample; use '
        "a batch of 4 or more"
    )


@pytest.mark.parametrize(
    ("batch", "micro_batch", "fix"),
    [
        (
            16,
            8,
            "16 samples a rank in micro-batches of 8 make 2, fewer than the 4 pipeline ranks; use a micro_batch of 5",
        ),
        (3, 1, "3 samples a rank in micro-batches of 1 make 3, fewer than the 4 pipeline ranks; use a batch of 4"),
    ],
)
def test_fewer_micro_batches_than_pipeline_ranks_are_refused(batch: int, micro_batch: int, fix: str) -> None:
    assert message(lambda: Layout(pipeline=4).check_batch(batch, micro_batch)).startswith(f'layout "pp4": {fix} or')


@given(
    pipeline=st.integers(2, 8),
    replicate=st.integers(1, 4),
    batch=st.integers(4, 200),
    micro_batch=st.integers(1, 60),
)
def test_the_micro_batch_proposed_for_a_pipeline_is_the_largest_that_is_accepted(
    pipeline: int, replicate: int, batch: int, micro_batch: int
) -> None:
    layout = Layout(pipeline=pipeline, replicate=replicate)
    largest_slice = max(len(range(rank, batch, replicate)) for rank in range(replicate))
    micro_batches = len(range(0, largest_slice, micro_batch))
    try:
        layout.check_batch(batch, micro_batch)
    except LayoutError as error:
        assert micro_batches < pipeline
        if found := re.search(r"a micro_batch of (\d+)", str(error)):
            layout.check_batch(batch, int(found[1]))
            with pytest.raises(LayoutError):
                layout.check_batch(batch, int(found[1]) + 1)
        else:
            (proposed,) = re.findall(r"a batch of (\d+) or more in micro-batches of 1", str(error))
            layout.check_batch(int(proposed), 1)
            with pytest.raises(LayoutError):
                layout.check_batch(batch, 1)
    else:
        assert micro_batches >= pipeline
