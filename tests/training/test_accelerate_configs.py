"""The configurations of `accelerate launch` match their descriptions, and FSDP shards the model by blocks."""

import re
from argparse import Namespace
from functools import partial

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_vit import HfViTModel
from hf_vit.model.encoder import HfViTLayer

from ..helpers.models import small_config
from ..helpers.processes import ROOT


FOLDER = ROOT / "scripts" / "accelerate"
# Maps the name of a configuration to its numbers of machines and processes, and whether it uses CPU, DDP and FSDP.
CONFIGS = {
    "one_cpu": (1, 1, True, False, False),
    "one_gpu": (1, 1, False, False, False),
    "eight_gpus": (1, 8, False, True, False),
    "eight_gpus_fsdp": (1, 8, False, False, True),
    "two_nodes": (2, 16, False, True, False),
}


def read(name: str, *options: str) -> Namespace:
    """Return the parsed configuration of an `accelerate launch` command line."""
    command = ["--config_file", str(FOLDER / f"{name}.yaml"), "--main_process_port", "0", *options, "train.py"]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


def test_every_configuration_starts_what_its_name_says_and_says_how_it_is_used_and_whether_it_was_run() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == CONFIGS.keys()
    for name, expected in CONFIGS.items():
        header = re.match(r"(#.*\n)+", (FOLDER / f"{name}.yaml").read_text())[0]
        assert f"accelerate launch --config_file scripts/accelerate/{name}.yaml " in header
        assert re.search("^# (Run|Not run: needs .*)\\.", header, flags=re.MULTILINE)
        found = vars(read(name))
        names = ("num_machines", "num_processes", "use_cpu", "multi_gpu", "use_fsdp")
        assert tuple(found[name] for name in names) == expected
        assert found["mixed_precision"] == ("no" if name == "one_cpu" else "bf16")
    found = read("two_nodes", "--machine_rank", "1", "--main_process_ip", "10.0.0.1")
    assert (found.machine_rank, found.main_process_ip, found.num_machines) == (1, "10.0.0.1", 2)


def test_fsdp_spreads_the_blocks_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in prepare_multi_gpu_env(read("eight_gpus_fsdp")).items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    # The Trainer's accelerator also creates the FSDP plugin without arguments.
    plugin, model = FullyShardedDataParallelPlugin(), HfViTModel(small_config())
    plugin.set_auto_wrap_policy(model)
    is_wrapped = partial(plugin.auto_wrap_policy, recurse=False, nonwrapped_numel=0)
    assert {type(module) for module in model.modules() if is_wrapped(module=module)} == {HfViTLayer}
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
