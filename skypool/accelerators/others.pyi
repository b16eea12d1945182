# Accelerators of AMD, AWS, Intel and others.
#
# For type checkers and editors: at run time `skypool.accelerators` makes each factory when its name is first used.
# Written by `python -m docs.generate.accelerators` from accelerators.csv; change that instead.

from typing import Literal, Never

from skypool.accelerators.factories import Model

# fmt: off
__all__ = [  # noqa: RUF022 - in the catalogue's order
    "MI50", "MI100", "MI210", "MI250", "MI250X", "MI300A", "MI300B", "MI300X", "MI308X", "MI325X", "MI350X", "MI355X",
    "RadeonPro_V520", "RadeonPro_V710", "Instinct_MI25", "Trainium1", "Trainium2", "Trainium3", "Inferentia1",
    "Inferentia2", "Gaudi", "Gaudi2", "Gaudi3", "Tenstorrent_n150", "Tenstorrent_n300", "Tenstorrent_p100a",
    "Tenstorrent_p150", "FPGA_VU9P", "FPGA_VU47P", "U30", "Qualcomm_AI100",
]
MI50: Model[Literal["16GB"], Literal["PCIe"]]
MI100: Model[Literal["32GB"], Literal["PCIe"]]
MI210: Model[Literal["64GB"], Literal["PCIe"]]
MI250: Model[Literal["128GB"], Literal["OAM"]]
MI250X: Model[Literal["128GB"], Literal["OAM"]]
MI300A: Model[Literal["128GB"], Literal["APU"]]
MI300B: Model[Literal["192GB"], Literal["OAM"]]
MI300X: Model[Literal["192GB"], Literal["OAM"]]
MI308X: Model[Literal["192GB"], Literal["OAM"]]
MI325X: Model[Literal["256GB"], Literal["OAM"]]
MI350X: Model[Literal["288GB"], Literal["OAM"]]
MI355X: Model[Literal["288GB"], Literal["OAM"]]
RadeonPro_V520: Model[Literal["8GB"], Literal["PCIe"]]
RadeonPro_V710: Model[Literal["28GB"], Literal["PCIe"]]
Instinct_MI25: Model[Literal["16GB"], Literal["PCIe"]]
Trainium1: Model[Literal["32GB"], Never]
Trainium2: Model[Literal["96GB"], Never]
Trainium3: Model[Literal["144GB"], Never]
Inferentia1: Model[Literal["8GB"], Never]
Inferentia2: Model[Literal["32GB"], Never]
Gaudi: Model[Literal["32GB"], Literal["OAM"]]
Gaudi2: Model[Literal["96GB"], Literal["OAM"]]
Gaudi3: Model[Literal["128GB"], Literal["OAM"]]
Tenstorrent_n150: Model[Literal["12GB"], Never]
Tenstorrent_n300: Model[Literal["24GB"], Never]
Tenstorrent_p100a: Model[Literal["28GB"], Never]
Tenstorrent_p150: Model[Literal["32GB"], Never]
FPGA_VU9P: Model[Literal["64GB"], Literal["PCIe"]]
FPGA_VU47P: Model[Literal["80GB"], Literal["PCIe"]]
U30: Model[Literal["24GB"], Literal["PCIe"]]
Qualcomm_AI100: Model[Literal["15.625GB"], Literal["PCIe"]]
