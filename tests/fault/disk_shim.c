/* Loaded before the C library (LD_PRELOAD): what a disk does on its worst day, to the files below one folder alone.
 *
 * fault_arm(operation, errno, after) lets `after` operations of a kind through, then every one fails until fault_disarm();
 * fault_count(operation) says how many there were since. fault_log(fd) has each change written down: a line of numbers and
 * names, then the bytes of a write. The folder is that of the environment's FAULT_ROOT, or of fault_root(path).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READ, WRITE, SYNC, CHANGE, KINDS }; /* CHANGE: whatever a read-only file system refuses, writes included */

static char root[PATH_MAX];
static size_t root_length;
static long counts[KINDS];
static int armed = -1, armed_errno, log_fd = -1;
static long armed_after, clock_shift;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("FAULT_ROOT"), *log = getenv("FAULT_LOG"), *shift = getenv("FAULT_CLOCK");
    if (path && strlen(path) < sizeof root)
        root_length = strlen(strcpy(root, path));
    if (log)
        log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (shift)
        clock_shift = atol(shift);
}

void fault_root(const char *path)
{
    if (strlen(path) < sizeof root)
        root_length = strlen(strcpy(root, path));
}

void fault_arm(int kind, int error, long after)
{
    memset(counts, 0, sizeof counts);
    armed_errno = error;
    armed_after = after;
    armed = kind;
}

void fault_disarm(void) { armed = -1; }
long fault_count(int kind) { return counts[kind]; }
void fault_clock(long seconds) { clock_shift = seconds; }

static int is_below(const char *path)
{
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* Give the file's path if it lies below the folder. */
static int path_of(int fd, char *path)
{
    char link[64];
    ssize_t length;
    if (!root_length || fd < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length <= 0)
        return 0;
    path[length] = 0;
    return is_below(path);
}

static int absolute(int folder, const char *path, char *out)
{
    char base[PATH_MAX];
    if (path[0] == '/')
        return snprintf(out, PATH_MAX, "%s", path) < PATH_MAX && is_below(out);
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base))
            return 0;
    } else if (!path_of(folder, base))
        return 0;
    return snprintf(out, PATH_MAX, "%s/%s", base, path) < PATH_MAX && is_below(out);
}

static int fails(int kind)
{
    long before = counts[kind]++;
    if (armed == kind && before >= armed_after) {
        errno = armed_errno;
        return 1;
    }
    return 0;
}

static int fails_to_write(void) { return fails(CHANGE) || fails(WRITE); }

static void note(const char *what, unsigned long node, long a, long b, const char *one, const char *two, const void *data)
{
    char line[2 * PATH_MAX + 128];
    struct iovec parts[2];
    int kept = errno;
    if (log_fd < 0)
        return;
    parts[0].iov_base = line;
    parts[0].iov_len = snprintf(line, sizeof line, "%s\t%lu\t%ld\t%ld\t%s\t%s\n", what, node, a, b, one, two);
    parts[1].iov_base = (void *)data;
    parts[1].iov_len = data ? b : 0;
    syscall(SYS_writev, log_fd, parts, data ? 2 : 1);
    errno = kept;
}

static unsigned long node_of(int fd)
{
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

/* A write that has happened; a file opened with O_DSYNC has it on the disk. */
static void note_write(int fd, off_t offset, ssize_t length, const void *data)
{
    int flags = fcntl(fd, F_GETFL);
    if (length > 0 && log_fd >= 0) {
        note("write", node_of(fd), offset, length, "", "", data);
        if (flags & O_DSYNC)
            note("synced", node_of(fd), offset, length, "", "", NULL);
    }
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) \
        real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int opened(const char *name, int folder, const char *path, int flags, mode_t mode)
{
    static int (*real)(int, const char *, int, ...);
    char full[PATH_MAX];
    struct stat found;
    int fd, is_ours = absolute(folder, path, full), is_new = 0;
    (void)name;
    if (!real)
        real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat64");
    if (is_ours && (flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) && fails(CHANGE))
        return -1;
    if (is_ours && (flags & O_CREAT))
        is_new = fstatat(folder, path, &found, 0) != 0;
    fd = real(folder, path, flags, mode);
    if (fd >= 0 && is_ours && log_fd >= 0) {
        if (is_new)
            note("create", node_of(fd), 0, 0, full, "", NULL);
        else if (flags & O_TRUNC)
            note("truncate", node_of(fd), 0, 0, full, "", NULL);
    }
    return fd;
}

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list more; \
        mode_t mode; \
        va_start(more, flags); \
        mode = mode_of(flags, more); \
        va_end(more); \
        return opened(#name, AT_FDCWD, path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        va_list more; \
        mode_t mode; \
        va_start(more, flags); \
        mode = mode_of(flags, more); \
        va_end(more); \
        return opened(#name, folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t length)
{
    char path[PATH_MAX];
    REAL(ssize_t, "write", int, const void *, size_t);
    if (path_of(fd, path)) {
        int is_appending = fcntl(fd, F_GETFL) & O_APPEND;
        off_t at = lseek(fd, 0, is_appending ? SEEK_END : SEEK_CUR);
        ssize_t done;
        if (fails_to_write())
            return -1;
        done = real(fd, data, length);
        note_write(fd, at, done, data);
        return done;
    }
    return real(fd, data, length);
}

#define PWRITE(name) \
    ssize_t name(int fd, const void *data, size_t length, off_t at) \
    { \
        char path[PATH_MAX]; \
        ssize_t done; \
        REAL(ssize_t, #name, int, const void *, size_t, off_t); \
        if (!path_of(fd, path)) \
            return real(fd, data, length, at); \
        if (fails_to_write()) \
            return -1; \
        done = real(fd, data, length, at); \
        note_write(fd, at, done, data); \
        return done; \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

static void note_vector(int fd, const struct iovec *parts, int count, off_t at, ssize_t done)
{
    for (int n = 0; n < count && done > 0; n++) {
        ssize_t own = done < (ssize_t)parts[n].iov_len ? done : (ssize_t)parts[n].iov_len;
        note_write(fd, at, own, parts[n].iov_base);
        at += own;
        done -= own;
    }
}

#define PWRITEV(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t at) \
    { \
        char path[PATH_MAX]; \
        ssize_t done; \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t); \
        if (!path_of(fd, path)) \
            return real(fd, parts, count, at); \
        if (fails_to_write()) \
            return -1; \
        done = real(fd, parts, count, at); \
        note_vector(fd, parts, count, at, done); \
        return done; \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    char path[PATH_MAX];
    off_t at;
    ssize_t done;
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    if (!path_of(fd, path))
        return real(fd, parts, count);
    at = lseek(fd, 0, SEEK_CUR);
    if (fails_to_write())
        return -1;
    done = real(fd, parts, count);
    note_vector(fd, parts, count, at, done);
    return done;
}

#define READS(name, parameters, arguments, types) \
    ssize_t name parameters \
    { \
        char path[PATH_MAX]; \
        static ssize_t(*real) types; \
        if (!real) \
            real = (ssize_t(*) types)dlsym(RTLD_NEXT, #name); \
        if (path_of(fd, path) && fails(READ)) \
            return -1; \
        return real arguments; \
    }
READS(read, (int fd, void *data, size_t length), (fd, data, length), (int, void *, size_t))
READS(pread, (int fd, void *data, size_t length, off_t at), (fd, data, length, at), (int, void *, size_t, off_t))
READS(pread64, (int fd, void *data, size_t length, off_t at), (fd, data, length, at), (int, void *, size_t, off_t))
READS(preadv, (int fd, const struct iovec *p, int n, off_t at), (fd, p, n, at), (int, const struct iovec *, int, off_t))
READS(preadv64, (int fd, const struct iovec *p, int n, off_t at), (fd, p, n, at), (int, const struct iovec *, int, off_t))

#define SYNCS(name) \
    int name(int fd) \
    { \
        char path[PATH_MAX]; \
        int done; \
        REAL(int, #name, int); \
        if (!path_of(fd, path)) \
            return real(fd); \
        if (fails(SYNC)) \
            return -1; \
        done = real(fd); \
        if (!done) \
            note("sync", node_of(fd), 0, 0, path, "", NULL); \
        return done; \
    }
SYNCS(fsync)
SYNCS(fdatasync)

#define TRUNCATES(name) \
    int name(int fd, off_t length) \
    { \
        char path[PATH_MAX]; \
        int done; \
        REAL(int, #name, int, off_t); \
        if (!path_of(fd, path)) \
            return real(fd, length); \
        if (fails(CHANGE)) \
            return -1; \
        done = real(fd, length); \
        if (!done) \
            note("truncate", node_of(fd), length, 0, path, "", NULL); \
        return done; \
    }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)

static int renamed(int from_folder, const char *from, int to_folder, const char *to)
{
    char one[PATH_MAX], two[PATH_MAX];
    int done, is_ours = absolute(from_folder, from, one) | absolute(to_folder, to, two);
    REAL(int, "renameat", int, const char *, int, const char *);
    if (is_ours && fails(CHANGE))
        return -1;
    done = real(from_folder, from, to_folder, to);
    if (!done && is_ours)
        note("rename", 0, 0, 0, one, two, NULL);
    return done;
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int one, const char *from, int two, const char *to) { return renamed(one, from, two, to); }

static int removed(int folder, const char *path, int flags)
{
    char full[PATH_MAX];
    int done, is_ours = absolute(folder, path, full);
    REAL(int, "unlinkat", int, const char *, int);
    if (is_ours && fails(CHANGE))
        return -1;
    done = real(folder, path, flags);
    if (!done && is_ours)
        note("remove", 0, 0, 0, full, "", NULL);
    return done;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }

static int made(int folder, const char *path, mode_t mode)
{
    char full[PATH_MAX];
    struct stat found;
    int done, is_ours = absolute(folder, path, full);
    REAL(int, "mkdirat", int, const char *, mode_t);
    if (is_ours && fails(CHANGE))
        return -1;
    done = real(folder, path, mode);
    if (!done && is_ours && !fstatat(folder, path, &found, 0))
        note("folder", found.st_ino, 0, 0, full, "", NULL);
    return done;
}

int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return made(folder, path, mode); }

int clock_gettime(clockid_t which, struct timespec *now)
{
    int done = syscall(SYS_clock_gettime, which, now);
    if (!done && which == CLOCK_REALTIME)
        now->tv_sec += clock_shift;
    return done;
}
