# NVIDIA's cards for desktops and workstations.
#
# For type checkers and editors: at run time `skypool.accelerators` makes each factory when its name is first used.
# Written by `python -m docs.generate.accelerators` from accelerators.csv; change that instead.

from typing import Literal, Never

from skypool.accelerators.accelerator import Accelerator
from skypool.accelerators.factories import Model

# fmt: off
__all__ = [  # noqa: RUF022 - in the catalogue's order
    "GB10", "RTX_PRO_6000", "RTX_PRO_5000", "RTX_PRO_4500", "RTX_PRO_4000", "RTX_6000_Ada", "RTX_5880_Ada",
    "RTX_5000_Ada", "RTX_4500_Ada", "RTX_4000_Ada", "RTX_4000_SFF_Ada", "RTX_2000_Ada", "RTX_A6000", "RTX_A5000",
    "RTX_A5000_Pro", "RTX_A4500", "RTX_A4000", "RTX_A2000", "Quadro_RTX_8000", "Quadro_RTX_6000", "Quadro_RTX_5000",
    "Quadro_RTX_4000", "Quadro_P4000", "Quadro_P2000", "Titan_RTX", "Titan_V", "Titan_Xp", "CMP_50HX", "RTX_5090",
    "RTX_5080", "RTX_5070_Ti", "RTX_5070", "RTX_5060_Ti", "RTX_5060", "RTX_4090", "RTX_4090D", "RTX_4080_Super",
    "RTX_4080", "RTX_4070_Ti_Super", "RTX_4070_Ti", "RTX_4070_Super", "RTX_4070", "RTX_4060_Ti", "RTX_4060",
    "RTX_3090_Ti", "RTX_3090", "RTX_3080_Ti", "RTX_3080", "RTX_3070_Ti", "RTX_3070", "RTX_3060_Ti", "RTX_3060",
    "RTX_3060_Laptop", "RTX_3050", "RTX_2080_Ti", "RTX_2080_Super", "RTX_2080", "RTX_2070_Super", "RTX_2070",
    "RTX_2060_Super", "RTX_2060", "GTX_1660_Ti", "GTX_1660_Super", "GTX_1660", "GTX_1650", "GTX_1080_Ti", "GTX_1080",
    "GTX_1070_Ti", "GTX_1070", "GTX_1060", "GTX_1050_Ti", "GTX_1050",
]


class _RTX_PRO_6000(Model["Literal['96GB']", "Literal['Server', 'Workstation', 'Max-Q']"]):
    partition_1g_24gb: Accelerator
    partition_1g_24gb_me: Accelerator
    partition_1g_24gb_gfx: Accelerator
    partition_1g_24gb_me_all: Accelerator
    partition_1g_24gb_no_me: Accelerator
    partition_2g_48gb: Accelerator
    partition_2g_48gb_gfx: Accelerator
    partition_2g_48gb_me_all: Accelerator
    partition_2g_48gb_no_me: Accelerator
    partition_4g_96gb: Accelerator
    partition_4g_96gb_gfx: Accelerator
    partition_1of8: Accelerator
    partition_1of4: Accelerator
    partition_1of2: Accelerator


GB10: Model[Literal["128GB"], Never]
RTX_PRO_6000: _RTX_PRO_6000
RTX_PRO_5000: Model[Literal["48GB", "72GB"], Literal["PCIe"]]
RTX_PRO_4500: Model[Literal["32GB"], Literal["PCIe"]]
RTX_PRO_4000: Model[Literal["24GB"], Literal["PCIe"]]
RTX_6000_Ada: Model[Literal["48GB"], Literal["PCIe"]]
RTX_5880_Ada: Model[Literal["48GB"], Literal["PCIe"]]
RTX_5000_Ada: Model[Literal["32GB"], Literal["PCIe"]]
RTX_4500_Ada: Model[Literal["24GB"], Literal["PCIe"]]
RTX_4000_Ada: Model[Literal["20GB"], Literal["PCIe"]]
RTX_4000_SFF_Ada: Model[Literal["20GB"], Literal["PCIe"]]
RTX_2000_Ada: Model[Literal["16GB"], Literal["PCIe"]]
RTX_A6000: Model[Literal["48GB"], Literal["PCIe"]]
RTX_A5000: Model[Literal["24GB"], Literal["PCIe"]]
RTX_A5000_Pro: Model[Literal["24GB"], Literal["PCIe"]]
RTX_A4500: Model[Literal["20GB"], Literal["PCIe"]]
RTX_A4000: Model[Literal["16GB"], Literal["PCIe"]]
RTX_A2000: Model[Literal["12GB", "6GB"], Literal["PCIe"]]
Quadro_RTX_8000: Model[Literal["48GB"], Literal["PCIe"]]
Quadro_RTX_6000: Model[Literal["24GB"], Literal["PCIe"]]
Quadro_RTX_5000: Model[Literal["16GB"], Literal["PCIe"]]
Quadro_RTX_4000: Model[Literal["8GB"], Literal["PCIe"]]
Quadro_P4000: Model[Literal["8GB"], Literal["PCIe"]]
Quadro_P2000: Model[Literal["5GB"], Literal["PCIe"]]
Titan_RTX: Model[Literal["24GB"], Literal["PCIe"]]
Titan_V: Model[Literal["12GB"], Literal["PCIe"]]
Titan_Xp: Model[Literal["12GB"], Literal["PCIe"]]
CMP_50HX: Model[Literal["10GB"], Literal["PCIe"]]
RTX_5090: Model[Literal["32GB"], Literal["PCIe"]]
RTX_5080: Model[Literal["16GB"], Literal["PCIe"]]
RTX_5070_Ti: Model[Literal["16GB"], Literal["PCIe"]]
RTX_5070: Model[Literal["12GB"], Literal["PCIe"]]
RTX_5060_Ti: Model[Literal["16GB", "8GB"], Literal["PCIe"]]
RTX_5060: Model[Literal["8GB"], Literal["PCIe"]]
RTX_4090: Model[Literal["24GB", "48GB"], Literal["PCIe"]]
RTX_4090D: Model[Literal["24GB"], Literal["PCIe"]]
RTX_4080_Super: Model[Literal["16GB"], Literal["PCIe"]]
RTX_4080: Model[Literal["16GB"], Literal["PCIe"]]
RTX_4070_Ti_Super: Model[Literal["16GB"], Literal["PCIe"]]
RTX_4070_Ti: Model[Literal["12GB"], Literal["PCIe"]]
RTX_4070_Super: Model[Literal["12GB"], Literal["PCIe"]]
RTX_4070: Model[Literal["12GB"], Literal["PCIe"]]
RTX_4060_Ti: Model[Literal["16GB", "8GB"], Literal["PCIe"]]
RTX_4060: Model[Literal["8GB"], Literal["PCIe"]]
RTX_3090_Ti: Model[Literal["24GB"], Literal["PCIe"]]
RTX_3090: Model[Literal["24GB"], Literal["PCIe"]]
RTX_3080_Ti: Model[Literal["12GB"], Literal["PCIe"]]
RTX_3080: Model[Literal["10GB", "12GB"], Literal["PCIe"]]
RTX_3070_Ti: Model[Literal["8GB"], Literal["PCIe"]]
RTX_3070: Model[Literal["8GB"], Literal["PCIe"]]
RTX_3060_Ti: Model[Literal["8GB"], Literal["PCIe"]]
RTX_3060: Model[Literal["12GB", "8GB"], Literal["PCIe"]]
RTX_3060_Laptop: Model[Literal["6GB"], Literal["laptop"]]
RTX_3050: Model[Literal["8GB", "6GB"], Literal["PCIe"]]
RTX_2080_Ti: Model[Literal["11GB", "22GB"], Literal["PCIe"]]
RTX_2080_Super: Model[Literal["8GB"], Literal["PCIe"]]
RTX_2080: Model[Literal["8GB"], Literal["PCIe"]]
RTX_2070_Super: Model[Literal["8GB"], Literal["PCIe"]]
RTX_2070: Model[Literal["8GB"], Literal["PCIe"]]
RTX_2060_Super: Model[Literal["8GB"], Literal["PCIe"]]
RTX_2060: Model[Literal["6GB", "12GB"], Literal["PCIe"]]
GTX_1660_Ti: Model[Literal["6GB"], Literal["PCIe"]]
GTX_1660_Super: Model[Literal["6GB"], Literal["PCIe"]]
GTX_1660: Model[Literal["6GB"], Literal["PCIe"]]
GTX_1650: Model[Literal["4GB"], Literal["PCIe"]]
GTX_1080_Ti: Model[Literal["11GB"], Literal["PCIe"]]
GTX_1080: Model[Literal["8GB"], Literal["PCIe"]]
GTX_1070_Ti: Model[Literal["8GB"], Literal["PCIe"]]
GTX_1070: Model[Literal["8GB"], Literal["PCIe"]]
GTX_1060: Model[Literal["6GB"], Literal["PCIe"]]
GTX_1050_Ti: Model[Literal["4GB"], Literal["PCIe"]]
GTX_1050: Model[Literal["2GB"], Literal["PCIe"]]
