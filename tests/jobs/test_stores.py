"""A run in an S3 store that loses a rank continues from its last save, at the same and at another number of ranks."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import MPI, call, environment, run
from helpers.object_store import BUCKET, SECRET, served
from helpers.speed import WAIT
from helpers.tiers import at_night

import hvdkit as hk

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, os, signal, sys
import keras, numpy as np
import hvdkit as hk

hk.init()
keras.utils.set_random_seed(5)
rng = np.random.default_rng(5)
ids = rng.integers(0, 50, (60, 3))
labels = (ids.sum(axis=1, keepdims=True) % 2).astype("float32")
layers = keras.layers
model = keras.Sequential(
    [keras.Input((3,), dtype="int64"), hk.layers.ShardedEmbedding(50, 8), layers.Flatten(), layers.Dense(1)])
model.compile("adagrad", "mse")

class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if os.environ.get("KILL") == str(epoch) and hk.rank() == hk.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

batches = hk.data.GlobalBatches((ids, labels), 12, shuffle_seed=3)
saves = hk.callbacks.SupervisorCallback(os.environ["LOGDIR"], data=batches, save_steps=5)
history = hk.fit(model, batches, epochs=4, steps_per_epoch=5, callbacks=[saves, Kill()], verbose=0)
digest = hk.compare_variables([v for v in model.trainable_variables if "embedding" not in v.path])
if hk.is_chief():
    sys.stdout.write(f"RESULT {json.dumps([history.history['loss'], digest])}\\n")  # in a single write
"""


def result(job):
    assert job.code == 0, job.output
    return json.loads(job.output.split("RESULT ")[1].splitlines()[0])


@pytest.mark.parametrize("ranks", at_night([2, 3], but=[2]))
def test_a_run_that_loses_a_rank_continues_from_the_store(tmp_path, ranks):
    with served() as store:

        def train(logdir, ranks, kill=""):
            return run(PROGRAM, MPI, ranks, LOGDIR=str(logdir), KILL=kill, **store.environment)

        losses, digest = result(train(tmp_path / "local", 3))
        logdir = f"s3://{BUCKET}/run"
        killed = train(logdir, 3, kill="2")
        assert killed.code != 0
        assert "RESULT" not in killed.output
        continued, continued_digest = result(train(logdir, ranks))
        if ranks == 3:
            assert (continued, continued_digest) == (losses[-len(continued) :], digest)
        else:
            assert continued == pytest.approx(losses[-len(continued) :], rel=1e-5)
        assert 2 <= len(continued) < 4


SMALL = f"""
import numpy as np, keras, hvdkit as hk

hk.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((8, 3), "float32")
hk.fit(model, x, x[:, :1], batch_size=4, verbose=0, logdir="s3://{BUCKET}/run")
"""


@pytest.mark.nightly
def test_hvdkit_run_names_the_variables_of_keys_that_it_does_not_pass_on(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    with served() as store:

        def train(*options):
            command = ["hvdkit", "run", "-np", "2", *options, "--", sys.executable, "train.py"]
            return call(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT), **store.environment))

        refused = train()
        assert refused.returncode
        assert "--env AWS_ACCESS_KEY_ID --env AWS_SECRET_ACCESS_KEY" in refused.stderr.splitlines()[-1], refused.stderr
        trained = train("--env", "AWS_ACCESS_KEY_ID", "--env", "AWS_SECRET_ACCESS_KEY")
        assert trained.returncode == 0, trained.stderr
        assert any(name.endswith("/manifest.json") for name in store.names("run"))


SAVES = f"""
import numpy as np
import hvdkit as hk

hk.init()
for step in 1, 2:
    hk.checkpoint.save(f"s3://{BUCKET}/run/step-{{step:09}}", {{"weights": np.full(9, float(step))}})
"""


def _killed_at(store, at, temporary):
    """Run the program, and kill it when request number ``at`` of its second save arrives."""
    ends: list[int] = []

    def fault(request):
        if request.method == "PUT" and request.key.endswith("000000001/manifest.json"):
            ends.append(request.number)
        if ends and request.number == ends[0] + 1 + at:
            program.kill()

    store.requests.clear()
    store.fault = fault
    env = environment(TMPDIR=str(temporary), **store.environment)
    program = subprocess.Popen([sys.executable, "-c", SAVES], env=env)
    program.wait(WAIT)
    store.fault = lambda request: None
    return program


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_kill_at_any_request_leaves_a_good_checkpoint(tmp_path):
    left = 0
    with served() as store:
        for at in itertools.count():
            for folder in tmp_path.iterdir():
                os.utime(folder, (0, 0))  # a long time ago
            program = _killed_at(store, at, tmp_path)
            left += any(tmp_path.iterdir())
            newest = hk.checkpoint.latest(f"s3://{BUCKET}/run")
            hk.checkpoint.verify(newest)
            if program.returncode == 0:
                break
        assert at > 5
        assert left > 1
        assert not list(tmp_path.iterdir())  # of each killed run, the next one has removed the local copies
        assert newest.name == "step-000000002"
        assert len(store.names("run")) == 5  # two files of each, and .recent


TABLE = """
import os
import numpy as np
import hvdkit as hk

hk.init()
rows, wide = 60_000, 64  # 15 MB, 5 MB for each of 3 ranks
path = f"s3://BUCKET/{os.environ['PARTITION']}/step-000000001"
table = hk.PartitionedVariable((rows, wide), name="table", initializer="zeros", partition=os.environ["PARTITION"])
expected = np.array(table.local_rows, "float32")
if "SAVES" in os.environ:
    table.assign_local(np.repeat(expected[:, None], wide, axis=1))
    hk.checkpoint.save(path, {"table": table, "small": np.ones(3)})
else:
    hk.checkpoint.restore(path, {"table": table, "small": np.zeros(3)})
    np.testing.assert_array_equal(table.local.numpy()[:, 5], expected)
""".replace("BUCKET", BUCKET)


@pytest.mark.nightly
@pytest.mark.parametrize(("partition", "share"), [("div", 1.0), ("mod", 2.0)])
def test_ranks_read_the_ranges_that_they_need(partition, share):
    """Each of two ranks needs half of a table; the checksums of interleaved rows cover the other half, too."""
    with served() as store:
        for ranks, extra in ((3, {"SAVES": "1"}), (2, {})):
            store.sent.clear()
            job = run(TABLE, MPI, ranks, PARTITION=partition, **extra, **store.environment)
            assert job.code == 0, job.output
        received = {key: count for key, count in store.sent.items() if "shard" in key}
    table_bytes = 60_000 * 64 * 4
    blocks_and_headers = 3 * 2 * 2**17 + 2 * 2**20  # of each file on each rank; a block that both ranks need
    assert len(received) == 3
    assert share * table_bytes <= sum(received.values()) <= share * table_bytes + blocks_and_headers


PYTHON = ROOT / ".cache" / "stores" / "bin" / "python"  # made by `make test-nightly`
SERVERS = {
    "gs": """
import json, time
from gcp_storage_emulator.server import create_server

server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
port = server._api._httpd.server_address[1]
print(json.dumps({"LOGDIR": "gs://bucket/run", "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}), flush=True)
time.sleep(3600)
""",
    "webdav": """
import json, sys
from cheroot import wsgi
from wsgidav.wsgidav_app import WsgiDAVApp

users = {"user_mapping": {"*": True}}
app = WsgiDAVApp({"provider_mapping": {"/": sys.argv[1]}, "simple_dc": users, "verbose": 1})
server = wsgi.Server(("127.0.0.1", 0), app)
server.prepare()
print(json.dumps({"LOGDIR": f"webdav+http://127.0.0.1:{server.bind_addr[1]}/team/run"}), flush=True)
server.serve()
""",
    "sftp": """
import asyncio, json, sys
import asyncssh

class Server(asyncssh.SSHServer):
    def password_auth_supported(self):
        return True

    def validate_password(self, username, password):
        return password == sys.argv[2]

async def main():
    keys = [asyncssh.generate_private_key("ssh-ed25519")]
    options = {"server_factory": Server, "server_host_keys": keys, "sftp_factory": True}
    server = await asyncssh.listen("127.0.0.1", 0, **options)
    place = f"user:{sys.argv[2]}@127.0.0.1:{server.get_port()}"
    print(json.dumps({"LOGDIR": f"sftp://{place}{sys.argv[1]}/team/run"}), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
""",
}


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON.exists(), reason="make test-nightly installs the servers and their clients")
@pytest.mark.parametrize("server", SERVERS)
def test_other_stores_than_s3(server, tmp_path):
    """An emulator of GCS, and WebDAV and SFTP, which have folders and no conditional writes."""
    losses, digest = result(run(PROGRAM, MPI, 2, LOGDIR=str(tmp_path / "local")))
    (tmp_path / "server").mkdir()
    command = [PYTHON, "-c", SERVERS[server], tmp_path / "server", SECRET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            variables = json.loads(process.stdout.readline())

            def train(**extra):
                env = environment(PYTHONPATH=str(ROOT), **variables, **extra)
                return call([*MPI, "2", PYTHON, "-c", PROGRAM], env=env, stderr=subprocess.STDOUT)

            killed = train(KILL="2")
            assert killed.returncode != 0
            assert "RESULT" not in killed.stdout
            continued = train()
            assert continued.returncode == 0, continued.stdout
            found, found_digest = json.loads(continued.stdout.split("RESULT ")[1].splitlines()[0])
            assert (found, found_digest) == (losses[-len(found) :], digest)
            assert 2 <= len(found) < 4
            assert SECRET not in killed.stdout + continued.stdout
        finally:
            process.kill()
