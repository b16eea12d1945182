"""Accelerators of AMD, AWS, Intel and others.

Written by `python -m skypool.accelerators._generate` from accelerators.csv; change that instead.
"""

from __future__ import annotations

from skypool.accelerators.model import Model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, Never

# fmt: off
__all__ = [  # noqa: RUF022 - in the catalogue's order
    "MI50", "MI100", "MI210", "MI250", "MI250X", "MI300A", "MI300B", "MI300X", "MI308X", "MI325X", "MI350X", "MI355X",
    "RadeonPro_V520", "RadeonPro_V710", "Instinct_MI25", "Trainium1", "Trainium2", "Trainium3", "Inferentia1",
    "Inferentia2", "Gaudi", "Gaudi2", "Gaudi3", "Tenstorrent_n150", "Tenstorrent_n300", "Tenstorrent_p100a",
    "Tenstorrent_p150", "FPGA_VU9P", "FPGA_VU47P", "U30", "Qualcomm_AI100",
]
# fmt: on
MI50: Model[Literal["16GB"], Literal["PCIe"]] = Model("MI50")
MI100: Model[Literal["32GB"], Literal["PCIe"]] = Model("MI100")
MI210: Model[Literal["64GB"], Literal["PCIe"]] = Model("MI210")
MI250: Model[Literal["128GB"], Literal["OAM"]] = Model("MI250")
MI250X: Model[Literal["128GB"], Literal["OAM"]] = Model("MI250X")
MI300A: Model[Literal["128GB"], Literal["APU"]] = Model("MI300A")
MI300B: Model[Literal["192GB"], Literal["OAM"]] = Model("MI300B")
MI300X: Model[Literal["192GB"], Literal["OAM"]] = Model("MI300X")
MI308X: Model[Literal["192GB"], Literal["OAM"]] = Model("MI308X")
MI325X: Model[Literal["256GB"], Literal["OAM"]] = Model("MI325X")
MI350X: Model[Literal["288GB"], Literal["OAM"]] = Model("MI350X")
MI355X: Model[Literal["288GB"], Literal["OAM"]] = Model("MI355X")
RadeonPro_V520: Model[Literal["8GB"], Literal["PCIe"]] = Model("RadeonPro_V520")
RadeonPro_V710: Model[Literal["28GB"], Literal["PCIe"]] = Model("RadeonPro_V710")
Instinct_MI25: Model[Literal["16GB"], Literal["PCIe"]] = Model("Instinct_MI25")
Trainium1: Model[Literal["32GB"], Never] = Model("Trainium1")
Trainium2: Model[Literal["96GB"], Never] = Model("Trainium2")
Trainium3: Model[Literal["144GB"], Never] = Model("Trainium3")
Inferentia1: Model[Literal["8GB"], Never] = Model("Inferentia1")
Inferentia2: Model[Literal["32GB"], Never] = Model("Inferentia2")
Gaudi: Model[Literal["32GB"], Literal["OAM"]] = Model("Gaudi")
Gaudi2: Model[Literal["96GB"], Literal["OAM"]] = Model("Gaudi2")
Gaudi3: Model[Literal["128GB"], Literal["OAM"]] = Model("Gaudi3")
Tenstorrent_n150: Model[Literal["12GB"], Never] = Model("Tenstorrent_n150")
Tenstorrent_n300: Model[Literal["24GB"], Never] = Model("Tenstorrent_n300")
Tenstorrent_p100a: Model[Literal["28GB"], Never] = Model("Tenstorrent_p100a")
Tenstorrent_p150: Model[Literal["32GB"], Never] = Model("Tenstorrent_p150")
FPGA_VU9P: Model[Literal["64GB"], Literal["PCIe"]] = Model("FPGA_VU9P")
FPGA_VU47P: Model[Literal["80GB"], Literal["PCIe"]] = Model("FPGA_VU47P")
U30: Model[Literal["24GB"], Literal["PCIe"]] = Model("U30")
Qualcomm_AI100: Model[Literal["15.625GB"], Literal["PCIe"]] = Model("Qualcomm_AI100")
