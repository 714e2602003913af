"""Python imports this at the start of every process of a scenario,
because RunDriver puts this directory on its path."""

import store_faults
import transfer_faults

store_faults.install()
transfer_faults.install()
