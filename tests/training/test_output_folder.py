"""Default output folders: each run gets a folder of its own."""

from pathlib import Path

from hf_vit.outputs import free_folder


def test_a_free_folder_holds_nothing_yet(tmp_path: Path) -> None:
    wanted = tmp_path / "outputs" / "dinov2-small.v1"
    assert free_folder(wanted) == free_folder(str(wanted)) == wanted
    assert not wanted.parent.exists(), "looking for a folder made one"
    wanted.mkdir(parents=True)
    assert free_folder(wanted) == wanted
    (wanted / "config.json").touch()
    assert free_folder(wanted) == wanted.with_name("dinov2-small.v1-2")
    wanted.with_name("dinov2-small.v1-2").touch()
    wanted.with_name("dinov2-small.v1-3").symlink_to("nowhere")
    assert free_folder(wanted) == wanted.with_name("dinov2-small.v1-4")
