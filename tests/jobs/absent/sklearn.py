"""Hide scikit-learn from jobs that do not need it: Keras imports it if it is installed, which takes half a second.

That is longer than the rest of such a job's computation.
"""

raise ImportError("not for this job")
