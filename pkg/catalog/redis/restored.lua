-- Ends a restore: the catalog has all that the backup had, and stays suspended. Its history is known up to the backup's point.
local P, coordinator, id = ARGV[1], ARGV[2], ARGV[3]
local call, key = redis.call, ARGV[1] .. 'suspended'
local leader = call('HGET', P .. 'leader', 'e') or '0'
if leader ~= coordinator or leader == '0' then return { 0, leader } end
local has = call('HMGET', key, 'x', 'y')
if has[1] ~= id then
  if not has[1] and call('GET', P .. 'restored') == id then return { 1, coordinator } end
  return { 2, has[1] or '' }
end
call('HSET', key, 'r', has[2])
call('HDEL', key, 'x', 'y')
call('SET', P .. 'restored', id)
return { 1, coordinator }
