"""What several tests share; pytest's ``pythonpath`` has this folder's parent, so tests import ``helpers.jobs`` etc."""
