"""What the lab's RunPod can be asked by GraphQL: as much of the real schema as clients were seen to use.

Names of types and fields are those of https://graphql-spec.runpod.io, as public clients use them (read 2026-11-21):
the runpod package 1.12.0 is one (read 2026-11-24). The lab has no serverless endpoints.
"""

from __future__ import annotations

from graphql import build_schema

_DEPLOY = """
  name: String, imageName: String, gpuCount: Int, cloudType: CloudTypeEnum, supportPublicIp: Boolean
  startSsh: Boolean, startJupyter: Boolean, containerDiskInGb: Int, volumeInGb: Int, volumeMountPath: String
  ports: String, dockerArgs: String, env: [EnvironmentVariableInput], dataCenterId: String, countryCode: String
  minVcpuCount: Int, minMemoryInGb: Int, minCudaVersion: String, allowedCudaVersions: [String], minDownload: Int
  minUpload: Int, networkVolumeId: String, templateId: String, containerRegistryAuthId: String, stopAfter: DateTime
  terminateAfter: DateTime, globalNetwork: Boolean
"""

SCHEMA = build_schema(f"""
scalar DateTime
scalar Void
enum CloudTypeEnum {{ ALL SECURE COMMUNITY }}

type Query {{
  gpuTypes(input: GpuTypeFilter): [GpuType]
  cpuFlavors(input: CpuFlavorInput): [CpuFlavor]
  dataCenters: [DataCenter]
  countryCodes: [String]
  myself: User
  pod(input: PodFilter): Pod
}}

type Mutation {{
  podFindAndDeployOnDemand(input: PodFindAndDeployOnDemandInput): Pod
  podRentInterruptable(input: PodRentInterruptableInput!): Pod
  deployCpuPod(input: deployCpuPodInput!): Pod
  podStop(input: PodStopInput!): Pod
  podResume(input: PodResumeInput!): Pod
  updateUserSettings(input: UpdateUserSettingsInput): User
  podTerminate(input: PodTerminateInput!): Void
}}

input GpuTypeFilter {{ id: String, ids: [String] }}
input CpuFlavorInput {{ id: String }}
input SpecificsInput {{ dataCenterId: String, instanceId: String }}
input PodFilter {{ podId: String }}
input PodStopInput {{ podId: String! }}
input PodResumeInput {{ podId: String!, gpuCount: Int, syncMachine: Boolean }}
input UpdateUserSettingsInput {{ pubKey: String }}
input PodTerminateInput {{ podId: String! }}
input EnvironmentVariableInput {{ key: String!, value: String! }}
input PodFindAndDeployOnDemandInput {{ {_DEPLOY} gpuTypeId: String, deployCost: Float }}
input PodRentInterruptableInput {{ {_DEPLOY} gpuTypeId: String, bidPerGpu: Float! }}
input deployCpuPodInput {{
  instanceId: String!, deployCost: Float
  name: String, imageName: String, cloudType: CloudTypeEnum, startSsh: Boolean, startJupyter: Boolean
  containerDiskInGb: Int, volumeMountPath: String, ports: String, dockerArgs: String, env: [EnvironmentVariableInput]
  dataCenterId: String, networkVolumeId: String, templateId: String, stopAfter: DateTime, terminateAfter: DateTime
}}
input GpuLowestPriceInput {{
  gpuCount: Int!, secureCloud: Boolean, dataCenterId: String, countryCode: String, minCudaVersion: String
  minDisk: Int, minMemoryInGb: Int, minVcpuCount: Int, supportPublicIp: Boolean
}}

type GpuType {{
  id: String, displayName: String, manufacturer: String, memoryInGb: Int, cudaCores: Int
  secureCloud: Boolean, communityCloud: Boolean, securePrice: Float, communityPrice: Float
  secureSpotPrice: Float, communitySpotPrice: Float, oneWeekPrice: Float, oneMonthPrice: Float, threeMonthPrice: Float
  maxGpuCount: Int, maxGpuCountSecureCloud: Int, maxGpuCountCommunityCloud: Int
  lowestPrice(input: GpuLowestPriceInput): LowestPrice
}}
type LowestPrice {{
  minimumBidPrice: Float, uninterruptablePrice: Float, minVcpu: Int, minMemory: Int, stockStatus: String
  countryCode: String
}}
type CpuFlavor {{
  id: String, displayName: String, groupName: String, minVcpu: Int, maxVcpu: Int, ramMultiplier: Float
  diskLimitPerVcpu: Int, specifics(input: SpecificsInput): Specifics
}}
type Specifics {{ stockStatus: String, securePrice: Float }}
type DataCenter {{ id: String, name: String, listed: Boolean }}
type User {{
  id: String, pubKey: String, clientBalance: Float, currentSpendPerHr: Float, spendLimit: Float
  pods: [Pod], networkVolumes: [NetworkVolume], endpoints: [Endpoint]
}}
type Endpoint {{
  id: String, name: String, aiKey: String, gpuIds: String, idleTimeout: Int, networkVolumeId: String, locations: String
  scalerType: String, scalerValue: Int, templateId: String, type: String, userId: String, version: Int, workersMax: Int
  workersMin: Int, workersStandby: Int, gpuCount: Int, env: [EnvironmentVariable], createdAt: DateTime
  networkVolume: NetworkVolume
}}
type EnvironmentVariable {{ key: String, value: String }}
type NetworkVolume {{ id: String, name: String, size: Int, dataCenterId: String }}
type Pod {{
  id: String, name: String, desiredStatus: String, costPerHr: Float, env: [String], imageName: String, ports: String
  dockerArgs: String, dockerId: String, gpuCount: Int, podType: String, machineId: String, machine: PodMachineInfo
  containerDiskInGb: Int, volumeInGb: Int, volumeMountPath: String, vcpuCount: Int, memoryInGb: Int, port: Int
  uptimeSeconds: Int, lastStatusChange: String, createdAt: DateTime, runtime: PodRuntime
}}
type PodMachineInfo {{ gpuDisplayName: String, podHostId: String, dataCenterId: String }}
type PodRuntime {{ uptimeInSeconds: Int, ports: [PodRuntimePorts] }}
type PodRuntimePorts {{ ip: String, isIpPublic: Boolean, privatePort: Int, publicPort: Int, type: String }}
""")
