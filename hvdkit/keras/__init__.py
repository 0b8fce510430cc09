"""All that knows Keras's ``fit``: ``hk.fit``, ``hk.evaluate`` and ``hk.predict``, and callbacks for plain ``fit``.

Each rank runs Keras's own loop on its share of every global batch, so that N ranks give the results of one process.
Users pass the whole data set on every rank; they get Keras's History, metrics or predictions, equal on all ranks. Start
with ``fitting.py``; the other two calls follow the same steps:

    inputs.py           from the arguments to shares; checks that all ranks pass the same data
    shares.py           splits global batches by rows; array_shares.py and global_batch_shares.py do so without reading
                        the rows of other ranks
    fit_session.py      replaces methods of the model while a call runs
    chief_variables.py  builds the model's variables, and broadcasts the chief's
    train_steps.py      the model's own step, run on a share
    losses.py           losses of the global batch: loss_scopes.py finds out which are means of their rows, and
                        step_scopes.py how the gradients of a model's own step combine
    moved_weights.py    finds steps that move weights, keep sums, or read state, by one rank's rows
    keras_callbacks.py  runs the user's callbacks, and compares their decisions between ranks
    metric_combiner.py  from the ranks' metric states to the logs of one process
    rank_functions.py   compares what the ranks' models compute for the same rows
    coupled_rows.py     finds models whose output for a row depends on the other rows of its batch
    checking/           compares steps of all ranks with those of one process

In plain ``fit``, each rank trains on its own data, and the callbacks of ``hvdkit.callbacks`` keep the ranks equal, and
compare them (``plain_fit.py``):
``broadcast.py``, the smallest, ``metrics.py``, ``step_callbacks.py`` and ``supervisor_callback.py``, which runs the
whole session of ``hk.supervisor``. ``horovod_callbacks.py`` has those of Horovod.
"""
