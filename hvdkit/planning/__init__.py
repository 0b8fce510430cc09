"""Table placement: the rows and columns of each rank, and their memory. Uses neither communication nor TensorFlow."""

from hvdkit.planning.layout import Group, Layout, Slice, lay_out
from hvdkit.planning.plan import Plan, plan_tables
from hvdkit.planning.table import PLACEMENTS, Placement, Table

__all__ = ["PLACEMENTS", "Group", "Layout", "Placement", "Plan", "Slice", "Table", "lay_out", "plan_tables"]
