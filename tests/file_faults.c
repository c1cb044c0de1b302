/* A shim of libc's file operations, for tests: fails the n-th one below a folder, or records them all.

   Loaded by LD_PRELOAD, and set by the process itself through `faults_arm` (tests/file_faults.py): forked children set
   theirs apart. Operations on other paths pass through. Counted are those that change or read files: open, read, write,
   fsync, truncate, rename, link, unlink, mkdir, rmdir; close is not, since a test can't tell what it lost.

   The record holds, for each operation that changes something, a line "<kind> <fd> <offset> <bytes> <path> [<path>]"; the
   bytes of a write follow its line. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = 1, ERROR = 2, SHORT = 3 };
enum { FILES = 1024, LONGEST = 1024 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char below[LONGEST]; /* the folder; empty: nothing is counted */
static int kind, number, repeats, error_number, changes_only;
static int count;
static int record = -1;
static char paths[FILES][LONGEST]; /* of open descriptors below the folder */

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void faults_arm(const char *folder, int fault, int at, int times, int number_of_error, int changes_alone) {
    pthread_mutex_lock(&lock);
    snprintf(below, sizeof below, "%s", folder);
    kind = fault, number = at, repeats = times, error_number = number_of_error, changes_only = changes_alone;
    count = 0;
    pthread_mutex_unlock(&lock);
}

int faults_count(void) { return count; }

void faults_record(const char *file) {
    record = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static void absolute(int folder, const char *path, char *whole) {
    char start[LONGEST] = "";
    if (path[0] != '/' && folder == AT_FDCWD) {
        if (getcwd(start, sizeof start) == NULL) start[0] = 0;
    } else if (path[0] != '/' && folder >= 0) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, start, sizeof start - 1);
        start[size > 0 ? size : 0] = 0;
    }
    if (path[0] == '/') snprintf(whole, LONGEST, "%s", path);
    else if (snprintf(whole, LONGEST, "%s/%s", start, path) >= LONGEST) whole[0] = 0;
}

static int is_below(const char *whole) {
    size_t size = strlen(below);
    return size > 0 && strncmp(whole, below, size) == 0 && (whole[size] == '/' || whole[size] == 0);
}

/* Counts an operation. 0: do it; 1: write a part of it; -1: errno is set. A kill comes before the operation. */
static int before(int changes) {
    if (changes_only && !changes) return 0;
    pthread_mutex_lock(&lock);
    int now = count++;
    pthread_mutex_unlock(&lock);
    if (kind == 0 || now < number || now >= number + repeats) return 0;
    if (kind == KILL) syscall(SYS_kill, getpid(), SIGKILL);
    if (kind == SHORT) return 1;
    errno = error_number;
    return -1;
}

static void note(const char *what, int fd, long offset, size_t bytes, const char *path, const char *other,
                 const void *data) {
    if (record < 0) return;
    char line[3 * LONGEST];
    int size = snprintf(line, sizeof line, "%s %d %ld %zu %s %s\n", what, fd, offset, data ? bytes : 0, path, other);
    pthread_mutex_lock(&lock);
    syscall(SYS_write, record, line, (size_t)size);
    if (data) syscall(SYS_write, record, data, bytes);
    pthread_mutex_unlock(&lock);
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    char whole[LONGEST];
    absolute(folder, path, whole);
    int counted = is_below(whole) && !(flags & O_PATH);
    int changes = (flags & (O_CREAT | O_TRUNC)) != 0;
    if (counted && before(changes) < 0) return -1;
    int fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && fd < FILES) snprintf(paths[fd], LONGEST, "%s", counted ? whole : "");
    if (counted && fd >= 0 && changes) note(flags & O_TRUNC ? "truncated" : "create", fd, 0, 0, whole, "", NULL);
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }

static const char *path_of(int fd) { return fd >= 0 && fd < FILES && paths[fd][0] && is_below(paths[fd]) ? paths[fd] : NULL; }

int close(int fd) {
    if (fd >= 0 && fd < FILES) paths[fd][0] = 0;
    return syscall(SYS_close, fd);
}

static ssize_t written(int fd, const void *data, size_t bytes, off_t offset) {
    const char *path = path_of(fd);
    if (path != NULL) {
        int fault = before(1);
        if (fault < 0) return -1;
        if (fault > 0 && bytes > 1) bytes /= 2;
    }
    off_t place = offset >= 0 || path == NULL ? offset : lseek(fd, 0, SEEK_CUR);
    ssize_t done = offset < 0 ? syscall(SYS_write, fd, data, bytes) : syscall(SYS_pwrite64, fd, data, bytes, offset);
    if (path != NULL && done > 0) note("write", fd, place, (size_t)done, path, "", data);
    return done;
}

ssize_t write(int fd, const void *data, size_t bytes) { return written(fd, data, bytes, -1); }
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at) { return written(fd, data, bytes, at); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t at) { return written(fd, data, bytes, at); }

ssize_t writev(int fd, const struct iovec *parts, int number_of_parts) {
    if (path_of(fd) == NULL) return syscall(SYS_writev, fd, parts, number_of_parts);
    for (int part = 0; part < number_of_parts; part++) /* the first one: a caller writes the rest again */
        if (parts[part].iov_len > 0) return written(fd, parts[part].iov_base, parts[part].iov_len, -1);
    return 0;
}

ssize_t read(int fd, void *data, size_t bytes) {
    if (path_of(fd) != NULL) {
        int fault = before(0);
        if (fault < 0) return -1;
        if (fault > 0 && bytes > 1) bytes /= 2;
    }
    return syscall(SYS_read, fd, data, bytes);
}

static int synced(int fd, long call) {
    const char *path = path_of(fd);
    if (path != NULL && before(1) < 0) return -1;
    int done = syscall(call, fd);
    if (path != NULL && done == 0) note("sync", fd, 0, 0, path, "", NULL);
    return done;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int truncated(int fd, off_t size) {
    const char *path = path_of(fd);
    if (path != NULL && before(1) < 0) return -1;
    int done = syscall(SYS_ftruncate, fd, size);
    if (path != NULL && done == 0) note("truncate", fd, size, 0, path, "", NULL);
    return done;
}

int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off_t size) { return truncated(fd, size); }

static int two(const char *what, long call, int from, const char *path, int to, const char *other, unsigned flags) {
    char old[LONGEST], new[LONGEST];
    absolute(from, path, old), absolute(to, other, new);
    int counted = is_below(new) || is_below(old);
    if (counted && before(1) < 0) return -1;
    int done = syscall(call, from, path, to, other, flags);
    if (counted && done == 0) note(what, -1, 0, 0, old, new, NULL);
    return done;
}

int rename(const char *path, const char *other) {
    return two("rename", SYS_renameat2, AT_FDCWD, path, AT_FDCWD, other, 0);
}
int renameat(int from, const char *path, int to, const char *other) {
    return two("rename", SYS_renameat2, from, path, to, other, 0);
}
int renameat2(int from, const char *path, int to, const char *other, unsigned flags) {
    return two("rename", SYS_renameat2, from, path, to, other, flags);
}
int link(const char *path, const char *other) { return two("link", SYS_linkat, AT_FDCWD, path, AT_FDCWD, other, 0); }
int linkat(int from, const char *path, int to, const char *other, int flags) {
    return two("link", SYS_linkat, from, path, to, other, (unsigned)flags);
}

static int removed(int folder, const char *path, int flags) {
    char whole[LONGEST];
    absolute(folder, path, whole);
    int counted = is_below(whole);
    if (counted && before(1) < 0) return -1;
    int done = syscall(SYS_unlinkat, folder, path, flags);
    if (counted && done == 0) note("remove", -1, 0, 0, whole, "", NULL);
    return done;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

static int made(int folder, const char *path, mode_t mode) {
    char whole[LONGEST];
    absolute(folder, path, whole);
    int counted = is_below(whole);
    if (counted && before(1) < 0) return -1;
    int done = syscall(SYS_mkdirat, folder, path, mode);
    if (counted && done == 0) note("folder", -1, 0, 0, whole, "", NULL);
    return done;
}

int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return made(folder, path, mode); }
