/* An NVML (NVIDIA's library for device management) for tests: libnvidia-ml.so.1 without a GPU.
 *
 * It follows a script, a text file named by the environment variable NVML_SCRIPT. Each line is "DEVICE NAME VALUE".
 * It is read again when another file has taken its place, so a test can change it while the library is in use. Without
 * a line for a value, the default below is taken; a value of -1 means "not supported". Without a script, no error of a
 * driver ever comes, and NVML_COUNT has the number of GPUs: for benchmarks, as looking for changes costs time.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNSUPPORTED = 3, TOO_SMALL = 7, NOT_FOUND = 6, NO_DRIVER = 9, TIMEOUT = 10, LOST = 15, INVALID = 2 };
#define MOST 16

typedef struct { int index; long seen; } Device;
static Device devices[MOST];
static int registered[MOST];

static struct { int device; char name[64]; long value; } lines[256];
static int count_of_lines;

/* Read the script if it is not the file that was read last. */
static void look(void) {
    static struct stat last;
    const char *path = getenv("NVML_SCRIPT");
    struct stat now;
    FILE *file;
    if (!path || stat(path, &now) || (now.st_ino == last.st_ino && now.st_mtim.tv_sec == last.st_mtim.tv_sec
                                      && now.st_mtim.tv_nsec == last.st_mtim.tv_nsec && now.st_size == last.st_size))
        return;
    if (!(file = fopen(path, "r"))) return;
    last = now;
    for (count_of_lines = 0; count_of_lines < 256; count_of_lines++)
        if (fscanf(file, "%d %63s %ld", &lines[count_of_lines].device, lines[count_of_lines].name,
                   &lines[count_of_lines].value) != 3) break;
    fclose(file);
}

static long value(int device, const char *name, long otherwise) {
    look();
    for (int i = 0; i < count_of_lines; i++)
        if (lines[i].device == device && !strcmp(lines[i].name, name)) return lines[i].value;
    return otherwise;
}

static unsigned count_of_devices(void) {
    const char *count = getenv("NVML_COUNT");
    return value(0, "count", count ? atoi(count) : 1);
}

/* What every call on a device begins with: it may hang, or find the device lost. */
static int enter(const Device *d) {
    while (value(d->index, "hang", 0)) usleep(50000);
    return value(d->index, "lost", 0) ? LOST : OK;
}

#define BEGIN(d) int failed = enter(d); if (failed) return failed
#define GIVE(d, name, otherwise, target) do { \
    BEGIN(d); long it = value((d)->index, name, otherwise); if (it < 0) return UNSUPPORTED; *(target) = it; return OK; \
} while (0)

const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == NO_DRIVER ? "Driver Not Loaded" : "an error"; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return value(0, "driver", 1) ? OK : NO_DRIVER; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = count_of_devices(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= count_of_devices()) return INVALID;
    devices[index].index = index;
    *device = &devices[index];
    return OK;
}
int nvmlDeviceGetIndex(Device *d, unsigned *index) { *index = d->index; return OK; }
int nvmlDeviceGetName(Device *d, char *name, unsigned size) { (void)d; snprintf(name, size, "NVIDIA H100 80GB HBM3"); return OK; }
int nvmlDeviceGetUUID(Device *d, char *uuid, unsigned size) { snprintf(uuid, size, "GPU-%08d-0000", d->index); return OK; }
int nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *later) { (void)d; *now = *later = 0; return OK; }

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Device *d, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = d->index;
    pci->id = 0x233010DE;
    return OK;
}
typedef struct { unsigned long long total, unused, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *d, Memory *m) {
    BEGIN(d);
    m->total = 81559ull << 20;
    m->used = (unsigned long long)value(d->index, "memory", 1024) << 20;
    m->unused = m->total - m->used;
    return OK;
}
typedef struct { unsigned gpu, memory; } Load;
int nvmlDeviceGetUtilizationRates(Device *d, Load *load) { load->memory = 0; GIVE(d, "busy", 0, &load->gpu); }
int nvmlDeviceGetPowerUsage(Device *d, unsigned *mw) { GIVE(d, "milliwatts", 70000, mw); }
int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *mw) { GIVE(d, "milliwatts_limit", 700000, mw); }
int nvmlDeviceGetTemperature(Device *d, int kind, unsigned *c) { (void)kind; GIVE(d, "celsius", 30, c); }
int nvmlDeviceGetClockInfo(Device *d, int kind, unsigned *mhz) { GIVE(d, kind == 1 ? "sm_mhz" : "memory_mhz", 1980, mhz); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, unsigned long long *bits) { GIVE(d, "throttled", 0, bits); }
int nvmlDeviceGetCurrPcieLinkWidth(Device *d, unsigned *lanes) { GIVE(d, "lanes", 16, lanes); }
int nvmlDeviceGetMaxPcieLinkWidth(Device *d, unsigned *lanes) { GIVE(d, "max_lanes", 16, lanes); }
int nvmlDeviceGetTotalEccErrors(Device *d, int kind, int span, unsigned long long *count) {
    (void)span;
    GIVE(d, kind ? "uncorrected" : "corrected", 0, count);
}
int nvmlDeviceGetRemappedRows(Device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    BEGIN(d);
    long it = value(d->index, "remap_failed", 0);
    if (it < 0) return UNSUPPORTED;
    *corrected = *uncorrected = 0;
    *pending = value(d->index, "remap_pending", 0);
    *failure = it;
    return OK;
}
int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *active) {
    BEGIN(d);
    if (link >= (unsigned)value(d->index, "links", 18)) return INVALID;
    *active = link < (unsigned)value(d->index, "links_up", 18);
    return OK;
}
typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; } Value;
typedef struct { uint32_t id, scope; int64_t at, latency; int type, result; Value value; } Field;
int nvmlDeviceGetFieldValues(Device *d, int count, Field *fields) {
    BEGIN(d);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (int i = 0; i < count; i++) {
        Field *f = &fields[i];
        long it = -1;
        if (f->id == 230) it = value(d->index, "recovery", 0);
        else if (f->id == 197 || f->id == 198)  /* bytes over PCIe: a rate in MiB per second */
            it = (now.tv_sec * 1000 + now.tv_nsec / 1000000) * value(d->index, "pcie", 0) * 1048;
        else if (f->id == 138 || f->id == 139)  /* KiB over NVLink */
            it = (now.tv_sec * 1000 + now.tv_nsec / 1000000) * value(d->index, "nvlink", 0);
        f->result = it < 0 ? UNSUPPORTED : OK;
        f->type = 3;
        f->value.ull = it;
    }
    return OK;
}
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *found) {
    BEGIN(d);
    long pid = value(d->index, "pid", 0);
    if (!pid) { *count = 0; return OK; }
    if (!found || *count < 1) { *count = 1; return TOO_SMALL; }
    *count = 1;
    found[0] = (Process){pid, (unsigned long long)value(d->index, "pid_memory", 512) << 20, 0, 0};
    return OK;
}

int nvmlEventSetCreate(void **set) { *set = registered; return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(Device *d, unsigned long long kinds, void *set) {
    (void)set;
    if (!(kinds & 8) || value(d->index, "no_events", 0)) return UNSUPPORTED;
    registered[d->index] = 1;
    d->seen = value(d->index, "xids", 0);
    return OK;
}
typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
int nvmlEventSetWait_v2(void *set, Event *event, unsigned ms) {
    (void)set;
    if (!getenv("NVML_SCRIPT")) {
        usleep(1000 * ms);
        return TIMEOUT;
    }
    for (unsigned waited = 0;; waited += 20) {
        for (int i = 0; i < MOST; i++) {
            long came = registered[i] ? value(i, "xids", 0) : 0;  /* how many have come so far; "xid" is their code */
            if (registered[i] && came > devices[i].seen) {
                devices[i].seen++;
                *event = (Event){&devices[i], 8, value(i, "xid", 79), 0xFFFFFFFF, 0xFFFFFFFF};
                return OK;
            }
        }
        if (waited >= ms) return TIMEOUT;
        usleep(20000);
    }
}

/* SM activity, through the GPU performance monitor. */
typedef struct { unsigned version, supported; } Support;
int nvmlGpmQueryDeviceSupport(Device *d, Support *s) { BEGIN(d); s->supported = value(d->index, "sm_activity", -1) >= 0; return OK; }
int nvmlGpmSampleAlloc(Device ***sample) { *sample = calloc(1, sizeof **sample); return OK; }
int nvmlGpmSampleFree(Device **sample) { free(sample); return OK; }
int nvmlGpmSampleGet(Device *d, Device **sample) { BEGIN(d); *sample = d; return OK; }
typedef struct { unsigned id; int result; double value; char *names[3]; } Metric;
typedef struct { unsigned version, count; Device **first, **second; Metric metrics[]; } Metrics;
int nvmlGpmMetricsGet(Metrics *m) {
    m->metrics[0].result = OK;
    m->metrics[0].value = value((*m->first)->index, "sm_activity", 0);
    return OK;
}

/* For the test that compares these structs with those of nvidia-ml-py. */
#define NVML_GPM_METRIC_MAX 477
unsigned size_of(const char *name) {
    struct { const char *name; unsigned size; } known[] = {
        {"nvmlPciInfo_t", sizeof(Pci)}, {"c_nvmlMemory_t", sizeof(Memory)}, {"c_nvmlUtilization_t", sizeof(Load)},
        {"c_nvmlFieldValue_t", sizeof(Field)}, {"c_nvmlProcessInfo_v3_t", sizeof(Process)},
        {"c_nvmlEventData_t", sizeof(Event)}, {"c_nvmlGpmSupport_t", sizeof(Support)}, {"c_nvmlGpmMetric_t", sizeof(Metric)},
        {"c_nvmlGpmMetricsGet_t", sizeof(Metrics) + NVML_GPM_METRIC_MAX * sizeof(Metric)},
    };
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) return known[i].size;
    return 0;
}
