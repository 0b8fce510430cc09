// For LD_PRELOAD: add the seconds in the file $JUMPING_CLOCK (a binary long) to CLOCK_REALTIME.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, id, now);
  const char *path = getenv("JUMPING_CLOCK");
  if (result == 0 && id == CLOCK_REALTIME && path != NULL) {
    long seconds = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
      if (read(file, &seconds, sizeof seconds) == sizeof seconds) now->tv_sec += seconds;
      close(file);
    }
  }
  return result;
}
