// Memory maps and buffers.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shim.h"

struct mmap_blob {
  char magic[8];
  char page[64];
  uint64_t key, address, size;
};
static const char kMagic[8] = "SHIMMEM";

doca_error_t doca_mmap_create(struct doca_mmap** mmap) {
  ENTER("doca_mmap_create");
  *mmap = calloc(1, sizeof(**mmap));
  (*mmap)->dmabuf = -1;
  return SUCCESS;
}

doca_error_t doca_mmap_destroy(struct doca_mmap* mmap) {
  ENTER("doca_mmap_destroy %s", mmap->imported ? "imported" : "own");
  if (mmap->buffers > 0) return NOT_PERMITTED;
  shim_leave(&mmap->page, !mmap->imported);
  if (mmap->mapped != NULL) munmap(mmap->mapped, mmap->mapped_size);
  if (mmap->dmabuf >= 0) close(mmap->dmabuf);
  if (mmap->dev != NULL) --mmap->dev->users;
  free(mmap->blob);
  free(mmap);
  return SUCCESS;
}

static doca_error_t set_range(struct doca_mmap* mmap, void* address, size_t size) {
  if (mmap->started) return BAD_STATE;
  if (mmap->address != NULL) return NOT_PERMITTED;
  if (address == NULL || size == 0) return INVALID_VALUE;
  mmap->address = address;
  mmap->size = size;
  return SUCCESS;
}

doca_error_t doca_mmap_set_memrange(struct doca_mmap* mmap, void* address, size_t size) {
  ENTER("doca_mmap_set_memrange %p %zu", address, size);
  return set_range(mmap, address, size);
}

doca_error_t doca_mmap_set_dmabuf_memrange(struct doca_mmap* mmap, int descriptor, void* address, size_t offset,
                                           size_t size) {
  ENTER("doca_mmap_set_dmabuf_memrange %d %p %zu %zu", descriptor, address, offset, size);
  doca_error_t status = set_range(mmap, address, size);
  if (status != SUCCESS) return status;
  mmap->dmabuf = dup(descriptor);
  mmap->dmabuf_offset = offset;
  return mmap->dmabuf < 0 ? INVALID_VALUE : SUCCESS;
}

doca_error_t doca_mmap_set_permissions(struct doca_mmap* mmap, uint32_t access) {
  ENTER("doca_mmap_set_permissions %u", access);
  if (mmap->started) return BAD_STATE;
  mmap->access = access;
  return SUCCESS;
}

doca_error_t doca_mmap_add_dev(struct doca_mmap* mmap, struct doca_dev* dev) {
  ENTER("doca_mmap_add_dev");
  if (mmap->started || mmap->dev != NULL) return NOT_PERMITTED;
  mmap->dev = dev;
  ++dev->users;
  return SUCCESS;
}

doca_error_t doca_mmap_start(struct doca_mmap* mmap) {
  ENTER("doca_mmap_start");
  if (mmap->address == NULL || mmap->dev == NULL) return INVALID_VALUE;
  mmap->started = 1;
  return SUCCESS;
}

// The file behind memory of this process, from the kernel's list of mappings.
static int find_file(const struct doca_mmap* mmap, struct page* place) {
  if (mmap->dmabuf >= 0) {
    snprintf(place->file, sizeof(place->file), "/proc/%d/fd/%d", getpid(), mmap->dmabuf);
    place->file_offset = mmap->dmabuf_offset;
    return 0;
  }
  FILE* maps = fopen("/proc/self/maps", "re");
  char line[512];
  int found = -1;
  while (found != 0 && maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
    unsigned long long from, to, at;
    char rights[8], path[256] = "";
    if (sscanf(line, "%llx-%llx %7s %llx %*s %*s %255s", &from, &to, rights, &at, path) < 4) continue;
    uint64_t start = (uint64_t)(uintptr_t)mmap->address;
    if (start < from || start + mmap->size > to) continue;
    if (path[0] != '/' || rights[3] != 's' || strstr(line, "(deleted)") != NULL) break;
    memcpy(place->file, path, sizeof(path));
    place->file_offset = at + (start - from);
    found = 0;
  }
  if (maps != NULL) fclose(maps);
  return found;
}

doca_error_t doca_mmap_export_rdma(struct doca_mmap* mmap, const struct doca_dev* dev, const void** blob,
                                   size_t* size) {
  ENTER("doca_mmap_export_rdma %u", mmap->access);
  if (!mmap->started || mmap->imported || (mmap->access & (RDMA_READ | RDMA_WRITE)) == 0) return NOT_PERMITTED;
  if (dev != mmap->dev) return NOT_FOUND;
  struct mmap_blob* made = calloc(1, sizeof(*made));
  free(mmap->blob);
  mmap->blob = made;
  if (!mmap->exported && shim_share(&mmap->page) != 0) return OPERATING_SYSTEM;
  mmap->exported = 1;
  struct page* page = mmap->page.page;
  if (find_file(mmap, page) != 0) return NOT_SUPPORTED;
  page->domain = dev->domain;
  page->access = mmap->access;
  page->address = (uint64_t)(uintptr_t)mmap->address;
  page->size = mmap->size;
  made->key = shim_random();
  __atomic_store_n(&page->key, made->key, __ATOMIC_SEQ_CST);
  memcpy(made->magic, kMagic, sizeof(kMagic));
  memcpy(made->page, mmap->page.name, sizeof(made->page));
  made->address = (uint64_t)(uintptr_t)mmap->address;
  made->size = mmap->size;
  *blob = made;
  *size = sizeof(*made);
  return SUCCESS;
}

static void map_peer(struct doca_mmap* found, const struct page* page) {
  int descriptor = open(page->file, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return;
  found->mapped_size = page->size;
  void* mapped = mmap(NULL, page->size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, (off_t)page->file_offset);
  found->mapped = mapped == MAP_FAILED ? NULL : mapped;
  close(descriptor);
}

doca_error_t doca_mmap_create_from_export(const union doca_data* user_data, const void* blob, size_t size,
                                          struct doca_dev* dev, struct doca_mmap** made) {
  ENTER("doca_mmap_create_from_export %zu", size);
  const struct mmap_blob* from = blob;
  if (user_data != NULL || size != sizeof(*from) || memcmp(from->magic, kMagic, sizeof(kMagic)) != 0)
    return INVALID_VALUE;
  struct doca_mmap* found = calloc(1, sizeof(*found));
  *found = (struct doca_mmap){.address = (uint8_t*)(uintptr_t)from->address, .size = from->size, .key = from->key};
  found->dmabuf = -1;
  found->imported = found->started = 1;
  found->dev = dev;
  ++dev->users;
  // As with a real card, whether somebody is there shows when it is used, and so does whether the range is right.
  if (shim_find(&found->page, from->page) != 0) found->page.page = NULL;
  if (found->page.page != NULL) map_peer(found, found->page.page);
  *made = found;
  return SUCCESS;
}

doca_error_t doca_mmap_get_memrange(const struct doca_mmap* mmap, void** address, size_t* size) {
  ENTER("doca_mmap_get_memrange");
  *address = mmap->address;
  *size = mmap->size;
  return SUCCESS;
}

uint8_t* shim_reach(const struct doca_buf* buf, uint8_t* at, size_t size, uint32_t right, uint64_t domain) {
  const struct doca_mmap* mmap = buf->mmap;
  if (!mmap->imported) return at;
  const struct page* page = mmap->page.page;
  if (page == NULL || mmap->mapped == NULL || !shim_owner_lives(&mmap->page)) return NULL;
  if (__atomic_load_n(&page->key, __ATOMIC_SEQ_CST) != mmap->key || page->domain != domain) return NULL;
  uint64_t start = (uint64_t)(uintptr_t)at;
  if ((page->access & right) == 0 || start < page->address || start + size > page->address + page->size) return NULL;
  return mmap->mapped + (start - page->address);
}

doca_error_t doca_buf_inventory_create(size_t count, struct doca_buf_inventory** inventory) {
  ENTER("doca_buf_inventory_create %zu", count);
  *inventory = calloc(1, sizeof(**inventory));
  (*inventory)->total = count;
  return SUCCESS;
}

doca_error_t doca_buf_inventory_destroy(struct doca_buf_inventory* inventory) {
  ENTER("doca_buf_inventory_destroy");
  if (inventory->used > 0) return IN_USE;
  free(inventory);
  return SUCCESS;
}

doca_error_t doca_buf_inventory_start(struct doca_buf_inventory* inventory) {
  ENTER("doca_buf_inventory_start");
  inventory->started = 1;
  return SUCCESS;
}

doca_error_t doca_buf_inventory_stop(struct doca_buf_inventory* inventory) {
  ENTER("doca_buf_inventory_stop");
  inventory->started = 0;
  return SUCCESS;
}

doca_error_t doca_buf_inventory_buf_get_by_args(struct doca_buf_inventory* inventory, struct doca_mmap* mmap,
                                                void* address, size_t size, void* data, size_t data_size,
                                                struct doca_buf** buf) {
  ENTER("doca_buf_inventory_buf_get_by_args %zu %zu", size, data_size);
  uint8_t *from = address, *at = data;
  if (!inventory->started || !mmap->started) return BAD_STATE;
  if (from < mmap->address || from + size > mmap->address + mmap->size) return INVALID_VALUE;
  if (at < from || at + data_size > from + size) shim_abort("a buffer's data lie outside of it");
  if (inventory->used == inventory->total) return NO_MEMORY;
  ++inventory->used;
  ++mmap->buffers;
  *buf = calloc(1, sizeof(**buf));
  **buf = (struct doca_buf){inventory, mmap, from, at, size, data_size};
  return SUCCESS;
}

doca_error_t doca_buf_set_data(struct doca_buf* buf, void* data, size_t size) {
  uint8_t* at = data;
  if (at < buf->address || at + size > buf->address + buf->size) shim_abort("a buffer's data lie outside of it");
  buf->data = at;
  buf->data_size = size;
  return SUCCESS;
}

doca_error_t doca_buf_dec_refcount(struct doca_buf* buf, uint16_t* count) {
  ENTER("doca_buf_dec_refcount");
  if (count != NULL) *count = 0;
  --buf->inventory->used;
  --buf->mmap->buffers;
  free(buf);
  return SUCCESS;
}
