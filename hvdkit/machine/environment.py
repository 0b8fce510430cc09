"""Environment variables: which of them contain secrets, and which a launcher has set for its job."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Names of variables whose values are neither shown nor forwarded to other hosts.
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
_JOB_VARIABLE = re.compile(
    r"OMPI_(?!MCA_|ALLOW_)|OMPI_MCA_(ess|orte|pmix)(_|$)|PMIX_(?!MCA_)|PMI_"
    r"|HOROVOD_(RANK|SIZE|HOSTNAME|LOCAL_(RANK|SIZE)|CROSS_(RANK|SIZE)|GLOO_RENDEZVOUS_)"
)
# Set by horovodrun --gloo for its ranks, or by users.
_GLOO_VARIABLES = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")


def outside_a_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of its job, which a nested launcher would mistake for its own.

    MPI_Init adds some. With Open MPI's ``OMPI_MCA_ess=pmi``, mpirun ends with 1 and prints nothing.

    Example:
        >>> outside_a_job({"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_btl": "tcp,self", "PMIX_RANK": "0"})
        {'OMPI_MCA_btl': 'tcp,self'}
        >>> outside_a_job({"HOROVOD_RANK": "0", "HOROVOD_CONTROLLER": "gloo"})
        {}
    """
    removed = _GLOO_VARIABLES if "HOROVOD_RANK" in environment else ()
    return {name: value for name, value in environment.items() if not _JOB_VARIABLE.match(name) and name not in removed}
