"""Folders laid out like the files of a system, with the values that real devices show."""

from pathlib import Path

PI_MEMORY = {
    "proc/meminfo": "MemTotal:         948304 kB\nMemFree:          101200 kB\nMemAvailable:     700000 kB\n",
    "proc/self/status": "Name:\tpython3\nVmSize:\t  900000 kB\nVmRSS:\t  200000 kB\n",
    "proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max cpu time              unlimited            unlimited            seconds   \n"
        "Max address space         unlimited            unlimited            bytes     \n"
    ),
}
PI = PI_MEMORY | {
    "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
    "proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\0",
    "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 108.00\n\nModel\t\t: Raspberry Pi 4 Model B Rev 1.4\n",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone0/temp": "48199\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "critical\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "110000\n",
    "sys/devices/platform/soc/soc:firmware/get_throttled": "0\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "cpufreq-dt\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1500000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1500000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "1500000\n",
}
FLAGS = "sys/devices/platform/soc/soc:firmware/get_throttled"
ZONE = "sys/class/thermal/thermal_zone0"
COUNT = "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
