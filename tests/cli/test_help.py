import pytest

COMMANDS = ("trace", "ptx-deps", "profile", "partition", "run", "adapt", "inspect", "demo")


def test_help_of_the_whole(process, golden) -> None:
    done = process("--help")
    assert done.returncode == 0
    golden(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(process, golden, command: str) -> None:
    done = process(command, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    golden(done.stdout)


def test_no_command_shows_the_help(process) -> None:
    done = process()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Commands:" in done.stderr


def test_version(process) -> None:
    done = process("--version")
    if done.returncode == 0:
        assert done.stdout.startswith("tessera ")
    else:  # a checkout that isn't installed
        assert "PackageNotFoundError" in done.stderr
