/* A stand-in for libnvidia-ml.so.1 whose whole state is a text file that a test may replace at any time.
 *
 * Format, rules and build switches: README.md beside this file. Layouts and codes are those of NVML's public
 * interface; -DNVML_DRIVER=470 builds a library that lacks what that driver branch lacked.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#ifndef NVML_DRIVER
#define NVML_DRIVER 570
#endif

#define EXPORT __attribute__((visibility("default")))
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
};

enum { MAX_GPUS = 16, MAX_INSTANCES = 16, MAX_PROCESSES = 4096, MAX_RULES = 64 };

#define NO_INSTANCE UINT32_MAX

/* --- NVML's structs -------------------------------------------------------------------------------- */

typedef struct {
    unsigned long long total, free, used;
} memory_v1_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
} process_v1_t;

typedef struct { /* v2 and v3 */
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} process_v2_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_t;

_Static_assert(sizeof(memory_v2_t) == 40 && sizeof(process_v1_t) == 16 && sizeof(process_v2_t) == 24, "layout");
_Static_assert(sizeof(pci_t) == 68, "layout");

/* --- the scenario ---------------------------------------------------------------------------------- */

enum kind { COMPUTE, GRAPHICS, MPS };
static const char *const KINDS[] = {"compute", "graphics", "mps"};

enum mig { MIG_UNSUPPORTED, MIG_OFF, MIG_ON };
static const char *const MIG_MODES[] = {"unsupported", "off", "on"};

enum action { FAIL, HANG, GROW };
static const char *const ACTIONS[] = {"fail", "hang", "grow"};

struct device { /* a GPU, or one MIG device of it */
    int present;
    char uuid[80], name[96], pci[32];
    int has_capability, major, minor;
    int has_memory;
    uint64_t total, free, used, reserved;
    enum mig mig;
    unsigned max_instances;
    unsigned gpu_instance, compute_instance;
};

struct process {
    const struct device *device;
    enum kind kind;
    uint32_t pid;
    uint64_t used;
};

struct rule {
    enum action action;
    char function[64], target[16]; /* fnmatch patterns */
    double value;                  /* return code, seconds, or how many calls are left */
};

static struct {
    char driver[80];
    struct device gpus[MAX_GPUS][1 + MAX_INSTANCES]; /* the GPU itself, then its MIG devices */
    struct process processes[MAX_PROCESSES];
    struct rule rules[MAX_RULES];
    size_t process_count, rule_count;
    unsigned gpu_count;
} scenario;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users; /* nvmlInit without nvmlShutdown */

/* --- reading it ------------------------------------------------------------------------------------ */

struct line {
    const char *path;
    int number;
    char *rest;
};

__attribute__((noreturn, format(printf, 2, 3))) static void die(const struct line *line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "fakenvml: %s:%d: ", line->path ? line->path : "", line->number);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    abort();
}

static const char *word(struct line *line, const char *what) {
    char *found = strsep(&line->rest, " ");
    if (!found || !*found)
        die(line, "%s is missing", what);
    return found;
}

static void text(struct line *line, char *out, size_t size, const char *value) {
    if (!value || !*value)
        die(line, "the text is missing");
    if (strlen(value) >= size)
        die(line, "longer than %zu characters: %s", size - 1, value);
    strcpy(out, value);
}

static uint64_t number(struct line *line, const char *what, uint64_t most) {
    const char *digits = word(line, what);
    char *end;
    errno = 0;
    uint64_t value = strtoull(digits, &end, 0);
    if (*digits == '-' || *end || errno || value > most)
        die(line, "%s is not a number up to %" PRIu64 ": %s", what, most, digits);
    return value;
}

static int choice(struct line *line, const char *const *names, size_t count, const char *what) {
    const char *given = word(line, what);
    for (size_t i = 0; i < count; i++)
        if (!strcmp(given, names[i]))
            return (int)i;
    die(line, "unknown %s: %s", what, given);
}

static struct device *add_gpu(struct line *line) {
    unsigned index = (unsigned)number(line, "GPU index", MAX_GPUS - 1);
    if (index != scenario.gpu_count)
        die(line, "GPUs are numbered from 0 without a gap, expected %u", scenario.gpu_count);
    scenario.gpu_count++;
    struct device *gpu = &scenario.gpus[index][0];
    gpu->present = 1;
    gpu->gpu_instance = gpu->compute_instance = NO_INSTANCE;
    return gpu;
}

static struct device *add_instance(struct line *line) {
    if (!scenario.gpu_count)
        die(line, "instance before any gpu");
    struct device *devices = scenario.gpus[scenario.gpu_count - 1];
    unsigned index = (unsigned)number(line, "MIG device index", MAX_INSTANCES - 1);
    struct device *instance = &devices[1 + index];
    if (instance->present)
        die(line, "instance %u is given twice", index);
    instance->present = 1;
    instance->gpu_instance = (unsigned)number(line, "GPU instance id", NO_INSTANCE);
    instance->compute_instance = (unsigned)number(line, "compute instance id", NO_INSTANCE);
    return instance;
}

static void add_process(struct line *line, const struct device *device) {
    if (scenario.process_count == MAX_PROCESSES)
        die(line, "more than %d processes", MAX_PROCESSES);
    struct process *process = &scenario.processes[scenario.process_count++];
    process->device = device;
    process->kind = (enum kind)choice(line, KINDS, COUNT(KINDS), "process list");
    process->pid = (uint32_t)number(line, "pid", UINT32_MAX);
    process->used = number(line, "used bytes", UINT64_MAX);
}

static void add_rule(struct line *line, enum action action) {
    if (scenario.rule_count == MAX_RULES)
        die(line, "more than %d rules", MAX_RULES);
    struct rule *rule = &scenario.rules[scenario.rule_count++];
    rule->action = action;
    text(line, rule->function, sizeof rule->function, word(line, "function"));
    text(line, rule->target, sizeof rule->target, word(line, "target"));
    const char *digits = word(line, "value");
    char *end;
    rule->value = strtod(digits, &end);
    if (*end || !(rule->value >= 0))
        die(line, "not a number: %s", digits);
}

static void read_memory(struct line *line, struct device *device) {
    device->has_memory = 1;
    device->total = number(line, "total", UINT64_MAX);
    device->free = number(line, "free", UINT64_MAX);
    device->used = number(line, "used", UINT64_MAX);
    device->reserved = number(line, "reserved", UINT64_MAX);
}

static void read_property(struct line *line, struct device *device, const char *key) {
    if (!device)
        die(line, "%s before any gpu", key);
    if (!strcmp(key, "uuid"))
        text(line, device->uuid, sizeof device->uuid, word(line, "uuid"));
    else if (!strcmp(key, "name"))
        text(line, device->name, sizeof device->name, strsep(&line->rest, ""));
    else if (!strcmp(key, "pci"))
        text(line, device->pci, sizeof device->pci, word(line, "bus id"));
    else if (!strcmp(key, "capability")) {
        device->has_capability = 1;
        device->major = (int)number(line, "major", 999);
        device->minor = (int)number(line, "minor", 999);
    } else if (!strcmp(key, "memory"))
        read_memory(line, device);
    else if (!strcmp(key, "process"))
        add_process(line, device);
    else if (!strcmp(key, "mig")) {
        device->mig = (enum mig)choice(line, MIG_MODES, COUNT(MIG_MODES), "MIG mode");
        device->max_instances = (unsigned)number(line, "most MIG devices", MAX_INSTANCES);
    } else
        die(line, "unknown keyword: %s", key);
}

static struct device *read_line(struct line *line, struct device *device) {
    const char *key = word(line, "keyword");
    for (size_t i = 0; i < COUNT(ACTIONS); i++)
        if (!strcmp(key, ACTIONS[i])) {
            add_rule(line, (enum action)i);
            return device;
        }
    if (!strcmp(key, "driver"))
        text(line, scenario.driver, sizeof scenario.driver, word(line, "driver version"));
    else if (!strcmp(key, "gpu"))
        return add_gpu(line);
    else if (!strcmp(key, "instance"))
        return add_instance(line);
    else
        read_property(line, device, key);
    return device;
}

static void read_scenario(const char *path, FILE *file) {
    memset(&scenario, 0, sizeof scenario);
    struct line line = {path, 0, NULL};
    struct device *device = NULL;
    char buffer[512];
    while (fgets(buffer, sizeof buffer, file)) {
        line.number++;
        size_t length = strcspn(buffer, "\n");
        if (buffer[length] != '\n')
            die(&line, "unfinished line, or longer than %zu characters", sizeof buffer - 2);
        buffer[length] = '\0';
        line.rest = buffer + strspn(buffer, " ");
        if (!*line.rest || *line.rest == '#')
            continue;
        device = read_line(&line, device);
        if (line.rest && *line.rest)
            die(&line, "more than expected: %s", line.rest);
    }
}

static void refresh(void) {
    static struct stat last;
    const struct line none = {getenv("KVWATCH_FAKENVML"), 0, NULL};
    FILE *file = none.path ? fopen(none.path, "re") : NULL;
    struct stat now;
    if (!file || fstat(fileno(file), &now))
        die(&none, "KVWATCH_FAKENVML names no file that can be read");
    if (now.st_mtim.tv_sec != last.st_mtim.tv_sec || now.st_mtim.tv_nsec != last.st_mtim.tv_nsec ||
        now.st_ino != last.st_ino || now.st_size != last.st_size) {
        read_scenario(none.path, file);
        last = now;
    }
    fclose(file);
}

/* --- every call passes here ------------------------------------------------------------------------ */

static struct rule *find_rule(enum action action, const char *function, const char *target) {
    for (size_t i = 0; i < scenario.rule_count; i++) {
        struct rule *rule = &scenario.rules[i];
        if (rule->action == action && !fnmatch(rule->function, function, 0) && !fnmatch(rule->target, target, 0))
            return rule;
    }
    return NULL;
}

static void sleep_through(double seconds) { /* signals do not shorten it, as in a wedged driver */
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
        ;
}

/* Takes the lock, which leave() gives back. Other threads' calls go on while one hangs. */
static int enter(const char *function, const char *target) {
    pthread_mutex_lock(&lock);
    refresh();
    struct rule *hang = find_rule(HANG, function, target);
    if (hang) {
        double seconds = hang->value;
        pthread_mutex_unlock(&lock);
        sleep_through(seconds);
        pthread_mutex_lock(&lock);
        refresh();
    }
    struct rule *fail = find_rule(FAIL, function, target);
    return fail ? (int)fail->value : SUCCESS;
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

static int enter_initialized(const char *function, const char *target) {
    int code = enter(function, target);
    return code == SUCCESS && !users ? UNINITIALIZED : code;
}

/* A handle is the device's place in the scenario, so that it outlives every change of it. */
static struct device *parent_of(const struct device *device) {
    return scenario.gpus[(device - scenario.gpus[0]) / (1 + MAX_INSTANCES)];
}

static int is_instance(const struct device *device) {
    return device != parent_of(device);
}

static int is_present(const struct device *device) {
    return device->present && (!is_instance(device) || parent_of(device)->mig == MIG_ON);
}

struct target {
    char text[16];
};

static struct target target_of(const struct device *device) {
    struct target target;
    int gpu = (int)((device - scenario.gpus[0]) / (1 + MAX_INSTANCES));
    int instance = (int)(device - parent_of(device)) - 1;
    snprintf(target.text, sizeof target.text, is_instance(device) ? "%d:%d" : "%d", gpu, instance);
    return target;
}

static int enter_device(const char *function, const struct device *device) {
    if (device < scenario.gpus[0] || device >= scenario.gpus[MAX_GPUS])
        die(&(struct line){function, 0, NULL}, "no handle of this library: %p", (const void *)device);
    int code = enter_initialized(function, target_of(device).text);
    return code == SUCCESS && !is_present(device) ? GPU_IS_LOST : code;
}

static int give_text(const char *value, char *out, unsigned size) {
    if (!*value)
        return NOT_SUPPORTED;
    if (strlen(value) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

/* --- the library and the system -------------------------------------------------------------------- */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = enter(__func__, "");
    users += code == SUCCESS;
    return leave(code);
}

EXPORT int nvmlShutdown(void) {
    int code = enter_initialized(__func__, "");
    users -= code == SUCCESS;
    return leave(code);
}

EXPORT const char *nvmlErrorString(int code) {
    static _Thread_local char message[32];
    snprintf(message, sizeof message, "error %d", code);
    return message;
}

EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    int code = enter_initialized(__func__, "");
    return leave(code == SUCCESS ? give_text(scenario.driver, out, size) : code);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = enter_initialized(__func__, "");
    *count = scenario.gpu_count;
    return leave(code);
}

/* --- handles --------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out) {
    if (index >= MAX_GPUS)
        return INVALID_ARGUMENT;
    *out = scenario.gpus[index];
    int code = enter_device(__func__, *out);
    return leave(code == SUCCESS || (*out)->present ? code : INVALID_ARGUMENT);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out) {
    int code = enter_initialized(__func__, "");
    struct device *first = scenario.gpus[0], *end = scenario.gpus[MAX_GPUS];
    for (*out = first; *out < end; ++*out)
        if (is_present(*out) && !strcmp((*out)->uuid, uuid))
            return leave(code);
    return leave(code == SUCCESS ? NOT_FOUND : code);
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **out) {
    int code = enter_device(__func__, device);
    if (code == SUCCESS && (is_instance(device) || index >= device->max_instances))
        code = INVALID_ARGUMENT;
    if (code == SUCCESS && !is_present(*out = device + 1 + index))
        code = NOT_FOUND;
    return leave(code);
}

/* --- what a device says of itself ------------------------------------------------------------------ */

EXPORT int nvmlDeviceGetUUID(struct device *device, char *out, unsigned size) {
    int code = enter_device(__func__, device);
    return leave(code == SUCCESS ? give_text(device->uuid, out, size) : code);
}

EXPORT int nvmlDeviceGetName(struct device *device, char *out, unsigned size) {
    int code = enter_device(__func__, device);
    return leave(code == SUCCESS ? give_text(device->name, out, size) : code);
}

EXPORT int nvmlDeviceGetPciInfo_v3(struct device *device, pci_t *out) {
    int code = enter_device(__func__, device);
    memset(out, 0, sizeof *out);
    return leave(code == SUCCESS ? give_text(device->pci, out->bus_id, sizeof out->bus_id) : code);
}

EXPORT int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor) {
    int code = enter_device(__func__, device);
    *major = device->major;
    *minor = device->minor;
    return leave(code == SUCCESS && !device->has_capability ? NOT_SUPPORTED : code);
}

EXPORT int nvmlDeviceGetMemoryInfo(struct device *device, memory_v1_t *out) {
    int code = enter_device(__func__, device);
    *out = (memory_v1_t){device->total, device->free, device->total - device->free};
    return leave(code == SUCCESS && !device->has_memory ? NOT_SUPPORTED : code);
}

#if NVML_DRIVER >= 510
EXPORT int nvmlDeviceGetMemoryInfo_v2(struct device *device, memory_v2_t *out) {
    int code = enter_device(__func__, device);
    if (code == SUCCESS && out->version != (2u << 24 | sizeof *out))
        code = ARGUMENT_VERSION_MISMATCH;
    *out = (memory_v2_t){out->version, device->total, device->reserved, device->free, device->used};
    return leave(code == SUCCESS && !device->has_memory ? NOT_SUPPORTED : code);
}
#endif

/* --- MIG ------------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetMigMode(struct device *device, unsigned *now, unsigned *pending) {
    int code = enter_device(__func__, device);
    *now = *pending = device->mig == MIG_ON;
    return leave(code == SUCCESS && device->mig == MIG_UNSUPPORTED ? NOT_SUPPORTED : code);
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) {
    int code = enter_device(__func__, device);
    *count = device->max_instances;
    return leave(code);
}

EXPORT int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *id) {
    int code = enter_device(__func__, device);
    *id = device->gpu_instance;
    return leave(code == SUCCESS && !is_instance(device) ? INVALID_ARGUMENT : code);
}

EXPORT int nvmlDeviceGetComputeInstanceId(struct device *device, unsigned *id) {
    int code = enter_device(__func__, device);
    *id = device->compute_instance;
    return leave(code == SUCCESS && !is_instance(device) ? INVALID_ARGUMENT : code);
}

/* --- process lists --------------------------------------------------------------------------------- */

static int is_listed(const struct process *process, const struct device *device, enum kind kind) {
    const struct device *holder = process->device;
    return process->kind == kind && is_present(holder) && (holder == device || parent_of(holder) == device);
}

/* With too little room: the room it takes, and INSUFFICIENT_SIZE. The v1 entry is a prefix of the v2 one. */
static int give_processes(const char *function, const struct device *device, enum kind kind, unsigned *count,
                          char *out, size_t size) {
    unsigned room = out ? *count : 0, found = 0;
    struct rule *grow = find_rule(GROW, function, target_of(device).text);
    if (room && grow && grow->value > 0) {
        grow->value--;
        ++*count;
        return INSUFFICIENT_SIZE;
    }
    for (size_t i = 0; i < scenario.process_count; i++) {
        const struct process *process = &scenario.processes[i];
        if (!is_listed(process, device, kind))
            continue;
        const struct device *holder = process->device;
        process_v2_t entry = {process->pid, process->used, holder->gpu_instance, holder->compute_instance};
        if (found < room)
            memcpy(out + found * size, &entry, size);
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESS_LIST(name, kind, entry_t)                                                                  \
    EXPORT int name(struct device *device, unsigned *count, entry_t *out) {                                \
        int code = enter_device(__func__, device);                                                         \
        if (code == SUCCESS)                                                                               \
            code = give_processes(__func__, device, kind, count, (char *)out, sizeof *out);                \
        return leave(code);                                                                                \
    }

#define PROCESS_LISTS(suffix, entry_t)                                                                     \
    PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses##suffix, COMPUTE, entry_t)                           \
    PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses##suffix, GRAPHICS, entry_t)                         \
    PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses##suffix, MPS, entry_t)

PROCESS_LISTS(, process_v1_t)
#if NVML_DRIVER >= 460
PROCESS_LISTS(_v2, process_v2_t)
#endif
#if NVML_DRIVER >= 510
PROCESS_LISTS(_v3, process_v2_t)
#endif
