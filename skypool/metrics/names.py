"""All metrics of skypool, with unit, kind and description.

Names under `hw.`, with their units and kinds, are those of OpenTelemetry's semantic conventions,
https://opentelemetry.io/docs/specs/semconv/hardware/ (package opentelemetry-semantic-conventions 0.66b2). A test
compares them. What the conventions lack, or define in a way that does not fit the values that skypool has, is under
`skypool.`. For example, `hw.gpu.io` counts bytes, and the samples of a node have bytes per second.
"""

from __future__ import annotations

from skypool.metrics.values import Metric

# --- devices, by the conventions -----------------------------------------------------------------------------

GPU_UTILIZATION = Metric(
    "hw.gpu.utilization", "1", "gauge", "Share of time in which at least one kernel ran on the device"
)
GPU_MEMORY_USAGE = Metric("hw.gpu.memory.usage", "By", "updown", "Used memory of the device")
GPU_MEMORY_LIMIT = Metric("hw.gpu.memory.limit", "By", "updown", "Size of the memory of the device")
GPU_MEMORY_UTILIZATION = Metric("hw.gpu.memory.utilization", "1", "gauge", "Share of the device's memory that is used")
POWER = Metric("hw.power", "W", "gauge", "Power that the device draws")
TEMPERATURE = Metric("hw.temperature", "Cel", "gauge", "Temperature of the device's chip")
ERRORS = Metric("hw.errors", "{error}", "counter", "Errors of the device by type: XID codes, and memory errors")
STATUS = Metric("hw.status", "1", "updown", "1 for the state that the device is in, and 0 for the other states")

# --- devices, beyond the conventions -------------------------------------------------------------------------

DEVICE_HEALTH = Metric(
    "skypool.device.health", "1", "updown", "1 for the health of the device, unknown included, and 0 for other states"
)
DEVICE_SM_ACTIVITY = Metric(
    "skypool.device.sm_activity", "1", "gauge", "Share of the device's streaming multiprocessors that were busy"
)
DEVICE_POWER_LIMIT = Metric("skypool.device.power.limit", "W", "gauge", "Most power that the device may draw")
DEVICE_CLOCK = Metric("skypool.device.clock", "Hz", "gauge", "Clock of the device's processors or memory")
DEVICE_THROTTLED = Metric(
    "skypool.device.throttled", "1", "updown", "1 for each reason why the device's clocks are lower than asked for"
)
DEVICE_PCIE_TRAFFIC = Metric("skypool.device.pcie.traffic", "By/s", "gauge", "Traffic of the device over PCIe")
DEVICE_NVLINK_TRAFFIC = Metric("skypool.device.nvlink.traffic", "By/s", "gauge", "Traffic of the device over NVLinks")
DEVICE_PCIE_LANES = Metric("skypool.device.pcie.lanes", "{lane}", "updown", "PCIe lanes of the device that are in use")
DEVICE_PCIE_LANES_LIMIT = Metric(
    "skypool.device.pcie.lanes.limit", "{lane}", "updown", "PCIe lanes that device and slot support"
)
DEVICE_NVLINKS = Metric("skypool.device.nvlinks", "{link}", "updown", "NVLinks of the device that are active")
DEVICE_NVLINKS_LIMIT = Metric("skypool.device.nvlinks.limit", "{link}", "updown", "NVLinks that the device has")
DEVICE_XIDS = Metric("skypool.device.xids", "{error}", "counter", "Errors of NVIDIA's driver by their XID code")

# --- nodes ---------------------------------------------------------------------------------------------------

NODE_CPU_UTILIZATION = Metric("skypool.node.cpu.utilization", "1", "gauge", "Share of the node's CPU time that is used")
NODE_MEMORY_USAGE = Metric("skypool.node.memory.usage", "By", "updown", "Used memory of the node")
NODE_MEMORY_LIMIT = Metric("skypool.node.memory.limit", "By", "updown", "Size of the memory of the node")
NODE_DISK_USAGE = Metric(
    "skypool.node.disk.usage", "By", "updown", "Used space on the disk of the folder in which calls run"
)
NODE_DISK_LIMIT = Metric("skypool.node.disk.limit", "By", "updown", "Size of the disk of the folder in which calls run")
NODE_DISK_TRAFFIC = Metric("skypool.node.disk.traffic", "By/s", "gauge", "Traffic of all disks of the node's machine")
NODE_NETWORK_TRAFFIC = Metric("skypool.node.network.traffic", "By/s", "gauge", "Network traffic of the node's machine")
NODE_CALLS = Metric("skypool.node.calls", "{call}", "updown", "Slots of the node that are busy")
NODE_SLOTS = Metric("skypool.node.slots", "{slot}", "updown", "Calls that the node can run at once")

# --- folders that are kept in buckets ------------------------------------------------------------------------

FOLDER_FILES = Metric("skypool.folder.files", "{file}", "counter", "Files of a kept folder that were saved")
FOLDER_SAVED = Metric("skypool.folder.saved", "By", "counter", "Bytes of a kept folder that were saved")
FOLDER_UNSAVED_FILES = Metric(
    "skypool.folder.unsaved.files", "{file}", "updown", "Files of a kept folder that are not saved as they are now"
)
FOLDER_UNSAVED = Metric("skypool.folder.unsaved.size", "By", "updown", "Bytes of the files that are not saved")
FOLDER_OLDEST = Metric(
    "skypool.folder.unsaved.time", "s", "gauge", "Time for which the first of the files that are not saved has waited"
)
FOLDER_RATE = Metric("skypool.folder.rate", "By/s", "gauge", "Bytes that were sent in a second, while some were sent")
FOLDER_TROUBLE = Metric(
    "skypool.folder.trouble", "1", "updown", "1 if the last attempt to save a kept folder, or to bring it back, failed"
)

# --- the pool ------------------------------------------------------------------------------------------------

NODES = Metric("skypool.nodes", "{node}", "updown", "Nodes of the pool by state")
CALLS = Metric("skypool.calls", "{call}", "counter", "Calls that have ended, by outcome")
CALLS_RETRIED = Metric("skypool.calls.retried", "{call}", "counter", "Runs of calls that were repeated")
CALLS_RUNNING = Metric("skypool.calls.running", "{call}", "updown", "Calls that run now")
CALLS_WAITING = Metric("skypool.calls.waiting", "{call}", "updown", "Calls that wait for a slot of a node")
CALL_DURATION = Metric("skypool.call.duration", "s", "histogram", "Wall time of calls, as measured on their nodes")
LAUNCHES = Metric("skypool.launches", "{order}", "counter", "Orders of machines at providers, by outcome")
COST = Metric("skypool.cost.usd", "{USD}", "updown", "Cost of machines since the start of the pool, in US dollars")
COST_RATE = Metric(
    "skypool.cost.usd_per_hour", "{USD}/h", "updown", "Price of the machines now, in US dollars per hour"
)
BUDGET = Metric("skypool.budget.usd", "{USD}", "updown", "Budget of the pool, in US dollars")
IDLE_COST = Metric("skypool.idle.usd", "{USD}", "updown", "Part of the cost that was paid for idle time, in US dollars")
IDLE_TIME = Metric("skypool.idle.time", "s", "updown", "Time that is charged for and in which machines were idle")

ALL: tuple[Metric, ...] = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
"""All of the metrics above."""
