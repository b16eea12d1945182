# Google's TPUs, as chips and as slices.
#
# For type checkers and editors: at run time `skypool.accelerators` makes each factory when its name is first used.
# Written by `python -m docs.generate.accelerators` from accelerators.csv; change that instead.

from typing import Literal, Never

from skypool.accelerators.factories import Model, SliceModel

# fmt: off
__all__ = [  # noqa: RUF022 - in the catalogue's order
    "TPUv2", "TPUv3", "TPUv4", "TPUv5e", "TPUv5p", "TPUv6", "TPU7x", "TPUv2_8", "TPUv2_32", "TPUv2_128", "TPUv2_256",
    "TPUv2_512", "TPUv3_8", "TPUv3_32", "TPUv3_64", "TPUv3_128", "TPUv3_256", "TPUv3_512", "TPUv3_1024", "TPUv3_2048",
    "TPUv4_8", "TPUv4_16", "TPUv4_32", "TPUv4_64", "TPUv4_128", "TPUv4_256", "TPUv4_512", "TPUv4_1024", "TPUv4_1536",
    "TPUv4_2048", "TPUv4_4096", "TPUv5e_1", "TPUv5e_2", "TPUv5e_4", "TPUv5e_8", "TPUv5e_16", "TPUv5e_32", "TPUv5e_64",
    "TPUv5e_128", "TPUv5e_256", "TPUv5p_8", "TPUv5p_16", "TPUv5p_32", "TPUv5p_64", "TPUv5p_128", "TPUv5p_256",
    "TPUv5p_384", "TPUv5p_512", "TPUv5p_640", "TPUv5p_768", "TPUv5p_896", "TPUv5p_1024", "TPUv5p_1152", "TPUv5p_1280",
    "TPUv5p_1408", "TPUv5p_1536", "TPUv5p_1664", "TPUv5p_1792", "TPUv5p_1920", "TPUv5p_2048", "TPUv5p_2176",
    "TPUv5p_2304", "TPUv5p_2432", "TPUv5p_2560", "TPUv5p_2688", "TPUv5p_2816", "TPUv5p_2944", "TPUv5p_3072",
    "TPUv5p_3200", "TPUv5p_3328", "TPUv5p_3456", "TPUv5p_3584", "TPUv5p_3712", "TPUv5p_3840", "TPUv5p_3968",
    "TPUv5p_4096", "TPUv5p_4224", "TPUv5p_4352", "TPUv5p_4480", "TPUv5p_4608", "TPUv5p_4736", "TPUv5p_4864",
    "TPUv5p_4992", "TPUv5p_5120", "TPUv5p_5248", "TPUv5p_5376", "TPUv5p_5504", "TPUv5p_5632", "TPUv5p_5760",
    "TPUv5p_5888", "TPUv5p_6016", "TPUv5p_6144", "TPUv5p_6272", "TPUv5p_6400", "TPUv5p_6528", "TPUv5p_6656",
    "TPUv5p_6784", "TPUv5p_6912", "TPUv5p_7040", "TPUv5p_7168", "TPUv5p_7296", "TPUv5p_7424", "TPUv5p_7552",
    "TPUv5p_7680", "TPUv5p_7808", "TPUv5p_7936", "TPUv5p_8064", "TPUv5p_8192", "TPUv5p_8320", "TPUv5p_8448",
    "TPUv5p_8704", "TPUv5p_8832", "TPUv5p_8960", "TPUv5p_9216", "TPUv5p_9472", "TPUv5p_9600", "TPUv5p_9728",
    "TPUv5p_9856", "TPUv5p_9984", "TPUv5p_10240", "TPUv5p_10368", "TPUv5p_10496", "TPUv5p_10752", "TPUv5p_10880",
    "TPUv5p_11008", "TPUv5p_11136", "TPUv5p_11264", "TPUv5p_11520", "TPUv5p_11648", "TPUv5p_11776", "TPUv5p_11904",
    "TPUv5p_12032", "TPUv5p_12160", "TPUv5p_12288", "TPUv5p_13824", "TPUv5p_17920", "TPUv6_1", "TPUv6_4", "TPUv6_8",
    "TPUv6_16", "TPUv6_32", "TPUv6_64", "TPUv6_128", "TPUv6_256", "TPU7x_2", "TPU7x_8", "TPU7x_16", "TPU7x_32",
    "TPU7x_64", "TPU7x_128", "TPU7x_256", "TPU7x_512", "TPU7x_1024", "TPU7x_2048", "TPU7x_4096", "V5E", "V5P", "V6E",
]
TPUv2: Model[Literal["16GB"], Never]
TPUv3: Model[Literal["32GB"], Never]
TPUv4: Model[Literal["32GB"], Never]
TPUv5e: Model[Literal["16GB"], Never]
TPUv5p: Model[Literal["95GB"], Never]
TPUv6: Model[Literal["32GB"], Never]
TPU7x: Model[Literal["192GB"], Never]
TPUv2_8: SliceModel
TPUv2_32: SliceModel
TPUv2_128: SliceModel
TPUv2_256: SliceModel
TPUv2_512: SliceModel
TPUv3_8: SliceModel
TPUv3_32: SliceModel
TPUv3_64: SliceModel
TPUv3_128: SliceModel
TPUv3_256: SliceModel
TPUv3_512: SliceModel
TPUv3_1024: SliceModel
TPUv3_2048: SliceModel
TPUv4_8: SliceModel
TPUv4_16: SliceModel
TPUv4_32: SliceModel
TPUv4_64: SliceModel
TPUv4_128: SliceModel
TPUv4_256: SliceModel
TPUv4_512: SliceModel
TPUv4_1024: SliceModel
TPUv4_1536: SliceModel
TPUv4_2048: SliceModel
TPUv4_4096: SliceModel
TPUv5e_1: SliceModel
TPUv5e_2: SliceModel
TPUv5e_4: SliceModel
TPUv5e_8: SliceModel
TPUv5e_16: SliceModel
TPUv5e_32: SliceModel
TPUv5e_64: SliceModel
TPUv5e_128: SliceModel
TPUv5e_256: SliceModel
TPUv5p_8: SliceModel
TPUv5p_16: SliceModel
TPUv5p_32: SliceModel
TPUv5p_64: SliceModel
TPUv5p_128: SliceModel
TPUv5p_256: SliceModel
TPUv5p_384: SliceModel
TPUv5p_512: SliceModel
TPUv5p_640: SliceModel
TPUv5p_768: SliceModel
TPUv5p_896: SliceModel
TPUv5p_1024: SliceModel
TPUv5p_1152: SliceModel
TPUv5p_1280: SliceModel
TPUv5p_1408: SliceModel
TPUv5p_1536: SliceModel
TPUv5p_1664: SliceModel
TPUv5p_1792: SliceModel
TPUv5p_1920: SliceModel
TPUv5p_2048: SliceModel
TPUv5p_2176: SliceModel
TPUv5p_2304: SliceModel
TPUv5p_2432: SliceModel
TPUv5p_2560: SliceModel
TPUv5p_2688: SliceModel
TPUv5p_2816: SliceModel
TPUv5p_2944: SliceModel
TPUv5p_3072: SliceModel
TPUv5p_3200: SliceModel
TPUv5p_3328: SliceModel
TPUv5p_3456: SliceModel
TPUv5p_3584: SliceModel
TPUv5p_3712: SliceModel
TPUv5p_3840: SliceModel
TPUv5p_3968: SliceModel
TPUv5p_4096: SliceModel
TPUv5p_4224: SliceModel
TPUv5p_4352: SliceModel
TPUv5p_4480: SliceModel
TPUv5p_4608: SliceModel
TPUv5p_4736: SliceModel
TPUv5p_4864: SliceModel
TPUv5p_4992: SliceModel
TPUv5p_5120: SliceModel
TPUv5p_5248: SliceModel
TPUv5p_5376: SliceModel
TPUv5p_5504: SliceModel
TPUv5p_5632: SliceModel
TPUv5p_5760: SliceModel
TPUv5p_5888: SliceModel
TPUv5p_6016: SliceModel
TPUv5p_6144: SliceModel
TPUv5p_6272: SliceModel
TPUv5p_6400: SliceModel
TPUv5p_6528: SliceModel
TPUv5p_6656: SliceModel
TPUv5p_6784: SliceModel
TPUv5p_6912: SliceModel
TPUv5p_7040: SliceModel
TPUv5p_7168: SliceModel
TPUv5p_7296: SliceModel
TPUv5p_7424: SliceModel
TPUv5p_7552: SliceModel
TPUv5p_7680: SliceModel
TPUv5p_7808: SliceModel
TPUv5p_7936: SliceModel
TPUv5p_8064: SliceModel
TPUv5p_8192: SliceModel
TPUv5p_8320: SliceModel
TPUv5p_8448: SliceModel
TPUv5p_8704: SliceModel
TPUv5p_8832: SliceModel
TPUv5p_8960: SliceModel
TPUv5p_9216: SliceModel
TPUv5p_9472: SliceModel
TPUv5p_9600: SliceModel
TPUv5p_9728: SliceModel
TPUv5p_9856: SliceModel
TPUv5p_9984: SliceModel
TPUv5p_10240: SliceModel
TPUv5p_10368: SliceModel
TPUv5p_10496: SliceModel
TPUv5p_10752: SliceModel
TPUv5p_10880: SliceModel
TPUv5p_11008: SliceModel
TPUv5p_11136: SliceModel
TPUv5p_11264: SliceModel
TPUv5p_11520: SliceModel
TPUv5p_11648: SliceModel
TPUv5p_11776: SliceModel
TPUv5p_11904: SliceModel
TPUv5p_12032: SliceModel
TPUv5p_12160: SliceModel
TPUv5p_12288: SliceModel
TPUv5p_13824: SliceModel
TPUv5p_17920: SliceModel
TPUv6_1: SliceModel
TPUv6_4: SliceModel
TPUv6_8: SliceModel
TPUv6_16: SliceModel
TPUv6_32: SliceModel
TPUv6_64: SliceModel
TPUv6_128: SliceModel
TPUv6_256: SliceModel
TPU7x_2: SliceModel
TPU7x_8: SliceModel
TPU7x_16: SliceModel
TPU7x_32: SliceModel
TPU7x_64: SliceModel
TPU7x_128: SliceModel
TPU7x_256: SliceModel
TPU7x_512: SliceModel
TPU7x_1024: SliceModel
TPU7x_2048: SliceModel
TPU7x_4096: SliceModel
V5E: Model[Literal["16GB"], Never]
V5P: Model[Literal["95GB"], Never]
V6E: Model[Literal["32GB"], Never]
