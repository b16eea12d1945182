"""RunPod's own SDK, led to the lab by RUNPOD_API_BASE_URL."""

import os

import runpod
from report import Report

runpod.api_key = os.environ["RUNPOD_API_KEY"]

with Report() as report:
    user = report.call("get", runpod.get_user)
    gpus = report.call("list", runpod.get_gpus)
    gpu = report.call("get", runpod.get_gpu, "NVIDIA A40")
    report.show(user=user, gpus=gpus, gpu=gpu)
    report.call("tag", runpod.update_user_settings, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA me")
    report.show(key=runpod.get_user()["pubKey"])

    order = {"image_name": "runpod/pytorch", "gpu_type_id": "NVIDIA A40", "cloud_type": "SECURE"}
    options = {"container_disk_in_gb": 20, "ports": "22/tcp", "env": {"NAME": "value"}}
    made = report.call("create", runpod.create_pod, "first", **order, **options)
    cpu = report.call("create", runpod.create_pod, "second", "runpod/base", instance_id="cpu3c-2-4")
    pods = report.call("list", runpod.get_pods)
    pod = report.call("get", runpod.get_pod, made["id"])
    report.show(made=made, cpu=cpu, pods=pods, pod=pod)
    report.show(stopped=report.call("end", runpod.stop_pod, made["id"]))
    report.show(resumed=report.call("create", runpod.resume_pod, made["id"], 1))

    report.refused("no stock", runpod.create_pod, "third", "runpod/pytorch", "NVIDIA L4")
    report.refused("bad id", runpod.create_pod, "third", "runpod/pytorch", "NVIDIA Nothing")
    report.refused("bad id", runpod.terminate_pod, "nobody")
    report.show(nobody=report.call("bad id", runpod.get_pod, "nobody"))
    report.refused("bad key", runpod.get_pods, api_key="rpa_wrong")

    report.call("end", runpod.terminate_pod, made["id"])
    report.call("end", runpod.terminate_pod, cpu["id"])
    report.show(left=runpod.get_pods())
