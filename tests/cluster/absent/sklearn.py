"""Stands before scikit-learn for jobs that do without: Keras imports it wherever it finds it, for half a second.

That is more than all else that such a job computes.
"""

raise ImportError("not for this job")
