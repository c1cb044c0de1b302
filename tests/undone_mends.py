"""Mends for accelerators, and how each is undone: to show that a test sees it.

Most are seen on the pretended accelerator: `python tests/undone_mends.py FOLDER TASK LAYOUT` takes the steps of a job
of `examples/proof` with the samestep in a folder, and prints as JSON what is wrong. What no step there can show has a
test of its own: `python tests/undone_mends.py FOLDER TEST` runs it with the samestep in a folder.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "src" / "samestep"


@dataclass(frozen=True, kw_only=True)
class Mend:
    """A line of samestep's that was mended, and what stood there before, or might have."""

    what: str
    file: str
    now: str
    before: str
    task: str = ""  # of a job of examples/proof, which is taken on the pretended accelerator
    layout: str = ""
    test: str = ""  # a test of its own, where there is no task
    seen: str  # what then is said, in part

    def __post_init__(self) -> None:
        assert bool(self.task) is bool(self.layout) is not bool(self.test)

    @property
    def tried_by(self) -> tuple[str, ...]:
        """What tries it, as words of this file's command."""
        return (self.test,) if self.test else (self.task, self.layout)


MENDS = (
    Mend(
        what="tied parameters stay tied on a device that PyTorch doesn't know by name",
        file="parallel/deferred_init.py",
        now="return nullcontext() if takes_over_memory(device) else _swapping(True)",
        before="return nullcontext()",
        task="language",
        layout="single",
        seen="another step",
    ),
    Mend(
        what="ranks tell each other on the CPU what their hosts have to know",
        file="comm/messages.py",
        now="return cpu if serves(group, cpu) else torch.device(device_type)",
        before="return torch.device(device_type)",
        task="text",
        layout="dp2",
        seen="waits for the device: comm/messages.py:largest",
    ),
    Mend(
        what="numbers of samples go to the device from pinned memory",
        file="parallel/exact/dropout.py",
        now='samples = moment.samples if device.type == "cpu" else moment.samples.pin_memory()',
        before="samples = moment.samples",
        task="text",
        layout="single",
        seen="waits for the device: parallel/exact/dropout.py:_sample_keys",
    ),
    Mend(
        what="the place of a dropout is a number, which nobody copies to the device",
        file="parallel/exact/dropout.py",
        now="place = self._sites[site]\n",
        before="place = torch.tensor(self._sites[site], device=device)\n",
        task="text",
        layout="single",
        seen="waits for the device: parallel/exact/dropout.py:_numbers",
    ),
    Mend(
        what="batches go to the device from pinned memory",
        file="data/loader.py",
        now='pin_memory=self._device.type != "cpu",',
        before="pin_memory=False,",
        task="regression",
        layout="single",
        seen="waits for the device: data/loader.py",
    ),
    Mend(
        what="whether gradients are clipped is not asked on the host",
        file="engines/native/trainer.py",
        now='if self._device.type != "cpu" or not has_values(coefficient) or coefficient != 1:',
        before="if coefficient != 1:",
        task="regression",
        layout="single",
        seen="waits for the device: engines/native/trainer.py:scale_and_clip",
    ),
    Mend(
        what="sums of buffers lie beside offloaded parameters",
        file="parallel/exact/buffers.py",
        now="        sums[place] = version.checksum",
        before="        sums = torch.stack([*sums.unbind()[:place], version.checksum, *sums.unbind()[place + 1 :]])",
        task="language",
        layout="fsdp2 offload=parameters",
        seen="on the same device",
    ),
    Mend(
        what="a proof compares offloaded parameters on the device",
        file="verification/tensors.py",
        now="value = as_real(value).to(device)  # offloaded",
        before="value = as_real(value)  # offloaded",
        task="language",
        layout="fsdp2 offload=parameters",
        seen="on the same device",
    ),
    Mend(
        what="a rank with two numbers or more does not ask how many all ranks have for a batch norm",
        file="parallel/exact/batch_norm.py",
        now="if own <= 1 and count <= 1:",
        before="if count <= 1:",
        test="test_accelerator.py::test_what_a_job_may_ask_for_waits_nowhere[batch-norm]",
        seen="waits for the device: parallel/exact/batch_norm.py:_statistics",
    ),
    Mend(
        what="ids beyond a sliced table are looked for on a CPU alone",
        file="parallel/tensor/layers.py",
        now='(input < 0) | (input >= total) if input.device.type == "cpu" else None',
        before="(input < 0) | (input >= total)",
        task="language",
        layout="tp2",
        seen="waits for the device: parallel/tensor/layers.py:forward",
    ),
    Mend(
        what="classes beyond sliced logits are looked for on a CPU alone",
        file="parallel/loss/vocabulary.py",
        now='if target.is_floating_point() or target.device.type != "cpu":',
        before="if target.is_floating_point():",
        task="language",
        layout="tp2",
        seen="waits for the device: parallel/loss/vocabulary.py:_check_targets",
    ),
    Mend(
        what="losses on an accelerator do not go with the flags of used parameters, which the host reads",
        file="parallel/unused_parameters.py",
        now='if totals.device.type != "cpu" or not has_values(totals):',
        before="if not has_values(totals):",
        task="regression",
        layout="dp2",
        seen="on the same device",
    ),
    Mend(
        what="a process group is bound to its rank's device",
        file="launch/world.py",
        now="        dist.init_process_group(backend, device_id=bound)",
        before="        dist.init_process_group(backend)",
        task="regression",
        layout="dp2",
        seen="bound_device_id",
    ),
    Mend(
        what="a logged step comes to the host without a wait",
        file="training/loop.py",
        now="there.copy_(numbers, non_blocking=True)",
        before="there.copy_(numbers)",
        test="test_accelerator.py::test_a_step_that_is_logged_is_read_without_a_wait_for_the_next_one",
        seen="training/loop.py:__init__",
    ),
    Mend(
        what="ZeRO-1 sends what a step has changed in large messages",
        file="parallel/zero1.py",
        now="of_lot = [_of_one_dtype(lots.get(lot, ())) for lots in by_lot]",
        before="of_lot = [[[p] for p in lots.get(lot, ())] for lots in by_lot]",
        test="test_few_messages.py::test_optimizer_shards_and_replicas_of_stages_send_few_large_messages",
        seen='["broadcast"] == 2',
    ),
    Mend(
        what="ZeRO-2 gathers once for all micro-batches, and FSDP keeps what a model has beside its blocks",
        file="parallel/fsdp.py",
        now="reshard_after_forward=layout.zero == 3 and part is not model,",
        before="reshard_after_forward=layout.zero == 3,",
        test="test_few_messages.py::test_what_a_model_has_beside_its_blocks_is_gathered_once_a_step",
        seen="assert",
    ),
    Mend(
        what="gradients that are summed after backward go in messages of some 25 MiB",
        file="parallel/sharding.py",
        now="for bucket in buckets([parameter for parameter, by_any in zip(trained, used, strict=True) if by_any]):",
        before="for bucket in [[parameter for parameter, by_any in zip(trained, used, strict=True) if by_any]]:",
        test="test_few_messages.py::test_gradients_that_are_summed_after_backward_do_not_go_in_one_message",
        seen="assert",
    ),
    Mend(
        what="a pipeline's tensors of a micro-batch are one batch",
        file="parallel/pipeline/p2p.py",
        now="works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer, group) for tensor in tensors])",
        before="works: list[Any] = [dist.isend(tensor, peer, group) for tensor in tensors]",
        test="test_few_messages.py::test_a_pipeline_sends_in_batches_alone",
        seen="assert",
    ),
    Mend(
        what="the rank that writes the model alone keeps it at a training's end",
        file="engines/native/trainer.py",
        now="return self._whole_state(kept=kept)",
        before="return self._whole_state(kept=True)",
        test="test_written_state.py::test_the_rank_that_writes_the_model_alone_keeps_it[fsdp2]",
        seen="assert",
    ),
    Mend(
        what="offloaded parameters go to other pipeline stages from the device, on which these receive them",
        file="parallel/sharding.py",
        now="value = value.to(self.mesh.grid.device_type).contiguous()",
        before="value = value.contiguous()",
        test="test_accelerator.py::test_offloaded_parameters_go_to_other_stages_from_the_device",
        seen="assert ['cpu', 'pretend'] == ['pretend']",
    ),
    Mend(
        what="the reference of a proof leaves its device's memory",
        file="verification/proof.py",
        now="release_memory(device_of(0, job.run.device))",
        before="pass",
        test="test_device.py::test_the_reference_of_a_proof_leaves_its_devices_memory",
        seen="assert [] == [True]",
    ),
    Mend(
        what="the end of a group finds its gloo beside another back end",
        file="launch/world.py",
        now="backend = backend_for_cpu(group)",
        before='backend = backend_for_cpu(group) if dist.get_backend(group) == "gloo" else None',
        test="test_world.py::test_gloo_is_found_beside_another_back_end",
        seen="assert",
    ),
    Mend(
        what="which parameters any rank used is told on the CPU under run.reduction: ordered",
        file="parallel/ordered.py",
        now="return largest(self._used, self._group, facts.device.type), facts",
        before="return facts.new_tensor(self._used).tolist(), facts",
        test="test_accelerator.py::test_what_a_job_may_ask_for_waits_nowhere[ordered]",
        seen="waits for the device: parallel/ordered.py:_all_reduce_facts",
    ),
    Mend(
        what="which parameters any rank used is told on the CPU where an optimizer steps whole matrices",
        file="parallel/optimizer/whole.py",
        now="if owned.grad is None and used:",
        before="if owned.grad is None and used and bool(taken[start] == taken[start]):",
        test="test_accelerator.py::test_what_a_job_may_ask_for_waits_nowhere[muon]",
        seen="waits for the device: parallel/optimizer/whole.py:_put_whole",
    ),
)


def unmended(mend: Mend, folder: Path) -> Path:
    """A copy of samestep without a mend. Raises ValueError where it is not there."""
    copy = folder / "samestep"
    copytree(PACKAGE, copy, ignore=lambda *_: ["__pycache__"])
    file = copy / mend.file
    text = file.read_text(encoding="utf-8")
    if text.count(mend.now) != 1:
        raise ValueError(f"{mend.file} has {text.count(mend.now)} times, where one is meant: {mend.now}")
    file.write_text(text.replace(mend.now, mend.before), encoding="utf-8")
    return folder


def problem(tried_by: Sequence[str], folder: Path, *, seconds: float) -> str | None:
    """What the samestep in a folder does wrong: in a test, which must fail, or under a task and a layout.

    None: nothing is wrong under these.
    """
    command = [sys.executable, __file__, str(folder), *tried_by]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT)
    if len(tried_by) == 1:
        assert done.returncode == 1, f"{tried_by[0]} does not fail:\n{done.stdout}{done.stderr}"
        return done.stdout
    if done.returncode:
        return done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found["problem"]


def _main(folder: str, *tried_by: str) -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(TESTS)])  # of the ranks
    sys.path[:0] = [folder]
    import samestep

    assert Path(samestep.__file__).parent == Path(folder) / "samestep"
    if len(tried_by) == 1:
        import pytest

        return pytest.main(["-q", "-p", "no:cacheprovider", "-m", "slow or not slow", str(TESTS / tried_by[0])])
    from test_accelerator import JOBS, problem_of

    from samestep import jobfile
    from samestep.launch import fork_server
    from samestep.rank_imports import rank_imports

    task, layout = tried_by
    job = jobfile.load(JOBS / f"{task}.yaml", []).job
    # Its ranks need not import all again.
    fork_server.fork_early(rank_imports(job), ranks=2)
    print(json.dumps({"problem": problem_of(task, layout)}))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
