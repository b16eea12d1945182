# NVIDIA's cards for data centers.
#
# For type checkers and editors: at run time `skypool.accelerators` makes each factory when its name is first used.
# Written by `python -m docs.generate.accelerators` from accelerators.csv; change that instead.

from typing import Literal

from skypool.accelerators.accelerator import Accelerator
from skypool.accelerators.factories import Model

# fmt: off
__all__ = [  # noqa: RUF022 - in the catalogue's order
    "K80", "K520", "M60", "P4", "P40", "P100", "V100", "T4", "T4G", "A2", "A10", "A10G", "A16", "A30", "A40", "A100",
    "A100X", "A800", "L4", "L20", "L40", "L40S", "H100", "H800", "H20", "H200", "GH200", "B100", "B200", "B300",
    "GB200", "GB300", "A100_80GB", "L4_VWS",
]


class _A30(Model["Literal['24GB']", "Literal['PCIe']"]):
    partition_1g_6gb: Accelerator
    partition_1g_6gb_me: Accelerator
    partition_2g_12gb: Accelerator
    partition_2g_12gb_me: Accelerator
    partition_4g_24gb: Accelerator


class _A100(Model["Literal['80GB', '40GB']", "Literal['SXM', 'PCIe']"]):
    partition_1g_10gb: Accelerator
    partition_1g_10gb_me: Accelerator
    partition_1g_20gb: Accelerator
    partition_2g_20gb: Accelerator
    partition_3g_40gb: Accelerator
    partition_4g_40gb: Accelerator
    partition_7g_80gb: Accelerator
    partition_1g_5gb: Accelerator
    partition_1g_5gb_me: Accelerator
    partition_2g_10gb: Accelerator
    partition_3g_20gb: Accelerator
    partition_4g_20gb: Accelerator
    partition_7g_40gb: Accelerator


class _A800(Model["Literal['80GB', '40GB']", "Literal['SXM', 'PCIe']"]):
    partition_1g_10gb: Accelerator
    partition_1g_10gb_me: Accelerator
    partition_1g_20gb: Accelerator
    partition_2g_20gb: Accelerator
    partition_3g_40gb: Accelerator
    partition_4g_40gb: Accelerator
    partition_7g_80gb: Accelerator
    partition_1g_5gb: Accelerator
    partition_1g_5gb_me: Accelerator
    partition_2g_10gb: Accelerator
    partition_3g_20gb: Accelerator
    partition_4g_20gb: Accelerator
    partition_7g_40gb: Accelerator


class _L4(Model["Literal['24GB']", "Literal['PCIe']"]):
    partition_1of8: Accelerator
    partition_1of4: Accelerator
    partition_1of2: Accelerator


class _H100(Model["Literal['80GB', '94GB', '96GB']", "Literal['SXM', 'PCIe', 'NVL']"]):
    partition_1g_10gb: Accelerator
    partition_1g_10gb_me: Accelerator
    partition_1g_20gb: Accelerator
    partition_2g_20gb: Accelerator
    partition_3g_40gb: Accelerator
    partition_4g_40gb: Accelerator
    partition_7g_80gb: Accelerator
    partition_1g_12gb: Accelerator
    partition_1g_12gb_me: Accelerator
    partition_1g_24gb: Accelerator
    partition_2g_24gb: Accelerator
    partition_3g_47gb: Accelerator
    partition_4g_47gb: Accelerator
    partition_7g_94gb: Accelerator
    partition_3g_48gb: Accelerator
    partition_4g_48gb: Accelerator
    partition_7g_96gb: Accelerator


class _H800(Model["Literal['80GB']", "Literal['SXM', 'PCIe']"]):
    partition_1g_10gb: Accelerator
    partition_1g_10gb_me: Accelerator
    partition_1g_20gb: Accelerator
    partition_2g_20gb: Accelerator
    partition_3g_40gb: Accelerator
    partition_4g_40gb: Accelerator
    partition_7g_80gb: Accelerator


class _H20(Model["Literal['96GB']", "Literal['SXM']"]):
    partition_1g_12gb: Accelerator
    partition_1g_12gb_me: Accelerator
    partition_1g_24gb: Accelerator
    partition_2g_24gb: Accelerator
    partition_3g_48gb: Accelerator
    partition_4g_48gb: Accelerator
    partition_7g_96gb: Accelerator


class _H200(Model["Literal['141GB']", "Literal['SXM', 'NVL']"]):
    partition_1g_18gb: Accelerator
    partition_1g_18gb_me: Accelerator
    partition_1g_35gb: Accelerator
    partition_2g_35gb: Accelerator
    partition_3g_71gb: Accelerator
    partition_4g_71gb: Accelerator
    partition_7g_141gb: Accelerator


class _GH200(Model["Literal['96GB', '144GB']", "Literal['superchip']"]):
    partition_1g_12gb: Accelerator
    partition_1g_12gb_me: Accelerator
    partition_1g_24gb: Accelerator
    partition_2g_24gb: Accelerator
    partition_3g_48gb: Accelerator
    partition_4g_48gb: Accelerator
    partition_7g_96gb: Accelerator
    partition_1g_18gb: Accelerator
    partition_1g_18gb_me: Accelerator
    partition_1g_36gb: Accelerator
    partition_2g_36gb: Accelerator
    partition_3g_72gb: Accelerator
    partition_4g_72gb: Accelerator
    partition_7g_144gb: Accelerator


class _B200(Model["Literal['180GB']", "Literal['SXM']"]):
    partition_1g_23gb: Accelerator
    partition_1g_23gb_me: Accelerator
    partition_1g_45gb: Accelerator
    partition_2g_45gb: Accelerator
    partition_3g_90gb: Accelerator
    partition_4g_90gb: Accelerator
    partition_7g_180gb: Accelerator


class _B300(Model["Literal['288GB']", "Literal['SXM']"]):
    partition_1g_34gb: Accelerator
    partition_1g_34gb_me: Accelerator
    partition_1g_67gb: Accelerator
    partition_2g_67gb: Accelerator
    partition_3g_135gb: Accelerator
    partition_4g_135gb: Accelerator
    partition_7g_269gb: Accelerator


class _GB200(Model["Literal['186GB']", "Literal['superchip']"]):
    partition_1g_23gb: Accelerator
    partition_1g_23gb_me: Accelerator
    partition_1g_47gb: Accelerator
    partition_2g_47gb: Accelerator
    partition_3g_93gb: Accelerator
    partition_4g_93gb: Accelerator
    partition_7g_186gb: Accelerator


class _GB300(Model["Literal['288GB']", "Literal['superchip']"]):
    partition_1g_35gb: Accelerator
    partition_1g_35gb_me: Accelerator
    partition_1g_70gb: Accelerator
    partition_2g_70gb: Accelerator
    partition_3g_139gb: Accelerator
    partition_4g_139gb: Accelerator
    partition_7g_278gb: Accelerator


K80: Model[Literal["12GB"], Literal["PCIe"]]
K520: Model[Literal["4GB"], Literal["PCIe"]]
M60: Model[Literal["8GB"], Literal["PCIe"]]
P4: Model[Literal["8GB"], Literal["PCIe"]]
P40: Model[Literal["24GB"], Literal["PCIe"]]
P100: Model[Literal["16GB"], Literal["PCIe", "SXM"]]
V100: Model[Literal["16GB", "32GB"], Literal["SXM", "PCIe", "FHHL"]]
T4: Model[Literal["16GB"], Literal["PCIe"]]
T4G: Model[Literal["16GB"], Literal["PCIe"]]
A2: Model[Literal["16GB"], Literal["PCIe"]]
A10: Model[Literal["24GB"], Literal["PCIe"]]
A10G: Model[Literal["24GB"], Literal["PCIe"]]
A16: Model[Literal["16GB"], Literal["PCIe"]]
A30: _A30
A40: Model[Literal["48GB"], Literal["PCIe"]]
A100: _A100
A100X: Model[Literal["80GB"], Literal["PCIe"]]
A800: _A800
L4: _L4
L20: Model[Literal["48GB"], Literal["PCIe"]]
L40: Model[Literal["48GB"], Literal["PCIe"]]
L40S: Model[Literal["48GB"], Literal["PCIe"]]
H100: _H100
H800: _H800
H20: _H20
H200: _H200
GH200: _GH200
B100: Model[Literal["192GB"], Literal["SXM"]]
B200: _B200
B300: _B300
GB200: _GB200
GB300: _GB300
A100_80GB: _A100
L4_VWS: _L4
