/* A clock that stands still: whoever is started with this library in LD_PRELOAD is told the time, of the wall clock and
 * of the monotonic one, that stands in the file which STILL_CLOCK names: eight bytes, µs since the Unix epoch. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *told;

__attribute__((constructor)) static void find_the_file(void) {
  const char *path = getenv("STILL_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *told, PROT_READ, MAP_SHARED, file, 0);
  if (page == MAP_FAILED)
    abort();
  close(file);
  told = page;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  if (clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID || !told)
    return (int)syscall(SYS_clock_gettime, clock, at);
  int64_t now = *told;
  at->tv_sec = now / 1000000;
  at->tv_nsec = now % 1000000 * 1000;
  return 0;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  int64_t now = *told;
  (void)zone;
  at->tv_sec = now / 1000000;
  at->tv_usec = now % 1000000;
  return 0;
}

time_t time(time_t *at) {
  time_t now = *told / 1000000;
  if (at)
    *at = now;
  return now;
}
