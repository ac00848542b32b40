"""Odd environments: closed and broken streams, no home, odd terminals and paths, and a workdir that
changes under a run. The program works, or ends in one line.
"""

import os
import pty
import subprocess
import sys

import pytest
from processes import ROOT, SETTINGS, STEPS, command, environment, read_result, start

CONFIGS = [sys.executable, "-m", "gtpo_jax", "configs"]


def shell(script, cwd=ROOT, **more):
  """Runs a shell script in which $GTPO lists the configs, a command that does not start JAX."""
  line = f"{sys.executable} -m gtpo_jax configs"
  env = {**os.environ, "PYTHONPATH": str(ROOT), "GTPO": line, **more}
  env = {name: value for name, value in env.items() if value is not None}
  return subprocess.run(
    ["bash", "-c", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
  )


@pytest.mark.parametrize(
  "script",
  [
    "$GTPO <&- >&- 2>&-",
    "$GTPO",
    "$GTPO <&-",
    "$GTPO >&-",
    "$GTPO 2>&-",
    "$GTPO >/dev/full",
    "$GTPO | true; exit ${PIPESTATUS[0]}",
    "nohup $GTPO",
    "env -u HOME $GTPO",
    "HOME=/proc/no XDG_CACHE_HOME=/proc/no TMPDIR=/proc/no $GTPO",
    "TERM=dumb COLUMNS=20 $GTPO",
    "TERM= COLUMNS=0 LINES=-1 $GTPO",
    "PYTHONIOENCODING=ascii LC_ALL=C $GTPO",
    "LC_ALL=xx_YY.nothing LANG= $GTPO",
    "ulimit -n 24; $GTPO",
    "mkdir /tmp/gtpo_gone_$$ && cd /tmp/gtpo_gone_$$ && rmdir $PWD && $GTPO",
  ],
)
@pytest.mark.some(1, slow=6)
def test_a_command_in_an_odd_environment(script):
  done = shell(script)
  assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
  assert done.returncode in (0, 1), done
  closed = ">&-" in script or "/dev/full" in script or "true" in script
  assert closed or "tiny" in done.stdout, done


@pytest.mark.slow
def test_a_message_with_any_characters_fits_any_terminal():
  """An ASCII terminal gets escapes; a name that is not UTF-8 does not end in a traceback."""
  script = (
    "PYTHONIOENCODING=ascii ${GTPO% configs} train --config=$'\\xff\\xe4\u65e5\\n.py' --workdir=x"
  )
  done = shell(script)
  assert done.returncode == 2 and done.stderr.startswith("gtpo: no config file at"), done
  assert len(done.stderr.splitlines()) == 1 and done.stderr.isascii()


@pytest.mark.slow
def test_what_a_closed_stream_would_print_does_not_end_up_in_a_file(tmp_path):
  """The next file that is opened would otherwise have the number of the closed stream."""
  script = f"""
import os, sys
from gtpo_jax.cli import main
main(["configs", "tiny"])
with open({str(tmp_path / "file")!r}, "w") as file:
  assert file.fileno() > 2
  os.write(1, b"printed by a library")
  os.write(2, b"printed by a library")
"""
  (tmp_path / "program.py").write_text(script)
  done = shell(f"{sys.executable} {tmp_path}/program.py <&- >&- 2>&-")
  assert done.returncode == 0 and (tmp_path / "file").read_bytes() == b""


# --- runs ---


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
  """The result of a run in an ordinary environment."""
  workdir = tmp_path_factory.mktemp("environment") / "ordinary"
  done = start(workdir, "-", SETTINGS)
  assert done.returncode == 0, done.stderr
  return read_result(workdir)


@pytest.mark.slow
def test_a_run_in_a_hostile_environment(expected, tmp_path):
  """No HOME, a narrow dumb terminal, stdin closed, an odd path, and it is stopped and continued."""
  (tmp_path / "real").mkdir()
  odd = tmp_path / "a b\n'\u65e5\u672c $HOME;"
  odd.symlink_to(tmp_path / "real")
  env = environment(TERM="dumb", COLUMNS="20", LINES="3", LC_ALL="C", PYTHONUNBUFFERED="1")
  env["FAULT"] = "(sleep 2; kill -CONT $PID) & kill -STOP $PID"
  env.pop("HOME", None)
  main, screen = pty.openpty()
  process = subprocess.Popen(
    command(odd / "run", "shell:sampling:2", SETTINGS),
    cwd=ROOT,
    env=env,
    stdin=subprocess.DEVNULL,
    stdout=screen,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(screen)
  printed = b""
  try:
    while data := os.read(main, 65536):
      printed += data
  except OSError:  # the terminal is closed
    pass
  errors = process.communicate(timeout=600)[1]
  assert process.returncode == 0, errors
  assert read_result(tmp_path / "real" / "run") == expected
  assert b"Traceback" not in printed


@pytest.mark.manual
def test_a_user_without_a_name_or_a_home(expected, tmp_path):
  """As in containers: a user that /etc/passwd lacks, and a HOME that belongs to somebody else."""
  if os.getuid():
    pytest.skip("only root can become another user")
  # The capability lets the user read Python wherever it is installed, but write nowhere.
  reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
  user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", *reading]
  os.chmod(tmp_path, 0o777)
  home = tmp_path / "home"
  home.mkdir(mode=0o700)
  env = environment(HOME=str(home))
  for name in ("USER", "LOGNAME", "LNAME", "USERNAME", "JAX_COMPILATION_CACHE_DIR"):
    env.pop(name, None)

  def run(workdir):
    line = [*user, *command(workdir, "-", SETTINGS)]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)

  done = run(tmp_path / "run")
  assert done.returncode == 0, done.stderr
  assert os.stat(tmp_path / "run" / "config.json").st_uid == 54321
  assert read_result(tmp_path / "run") == expected
  refused = run(home / "run")
  assert refused.returncode == 2, refused
  message = f"gtpo: cannot write into workdir '{home / 'run'}': Permission denied\n"
  assert refused.stderr.endswith(message)


@pytest.mark.slow
@pytest.mark.manual
def test_sixteen_samplers_at_once(expected, tmp_path):
  """They share a checkpoint and an empty compile cache, and print the same text."""
  workdir = tmp_path / "run"
  assert start(workdir, "-", SETTINGS).returncode == 0
  line = [sys.executable, "-m", "gtpo_jax", "sample", f"--model={workdir}", "--prompt=1+2="]
  env = environment(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
  samplers = [
    subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(16)
  ]
  printed = [sampler.communicate(timeout=1800) for sampler in samplers]
  assert [sampler.returncode for sampler in samplers] == [0] * 16, printed
  assert len(set(printed)) == 1 and not printed[0][1] and printed[0][0].strip(), printed
  assert read_result(workdir) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
  ("event", "fault", "message"),
  [
    pytest.param("shell:update:2", 'rm -rf "$WORKDIR"', "cannot ", marks=pytest.mark.manual),
    ("shell:metrics:4", 'rm -f "$WORKDIR"/*.jsonl; mkdir "$WORKDIR"/metrics.jsonl', "directory"),
  ],
  ids=["removed", "a log replaced by a folder"],
)
def test_a_workdir_that_changes_under_a_run(event, fault, message, tmp_path):
  """The run ends in one line; once the workdir is as it was, the same command completes it."""
  workdir = tmp_path / "run"
  failed = start(workdir, event, SETTINGS, FAULT=fault, WORKDIR=str(workdir))
  ours = [line for line in failed.stderr.splitlines() if line.startswith("gtpo: ")]
  assert failed.returncode in (1, 2), failed.stderr
  assert len(ours) == 1 and message in ours[0] and "\nTraceback" not in failed.stderr, failed.stderr
  done = start(workdir, "-", SETTINGS)
  assert done.returncode == 0, done.stderr
  assert (workdir / "checkpoints" / str(STEPS)).is_dir()
