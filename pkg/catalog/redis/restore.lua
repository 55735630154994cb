-- Begins a restore: checks that the catalog is empty and suspends it with the backup's point as witness. While the field x of suspended
-- names the backup nothing takes the catalog into service.
local P, coordinator, by, id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local inc, seq, digest = ARGV[5], ARGV[6], ARGV[7]
local kinds, pos = tonumber(ARGV[8]), 8
local call, key = redis.call, ARGV[1] .. 'suspended'
local leader = call('HGET', P .. 'leader', 'e') or '0'
if leader ~= coordinator or leader == '0' then return { 0, leader } end
local begun = call('HGET', key, 'x')
if begun == id then return { 1, coordinator } end
if begun then return { 2, begun } end
if call('EXISTS', key) == 1 and call('GET', P .. 'restored') == id then return { 1, coordinator } end
for i = 1, kinds do
  local kind = ARGV[pos + i]
  if call('EXISTS', P .. 'k:' .. kind) == 1 then return { 3, kind } end
end
pos = pos + kinds
local here = tonumber(call('GET', P .. 'seq') or '0')
local has = call('HMGET', key, 't', 's')
if not has[1] then
  local clock = call('TIME')
  local now = string.format('%.0f', tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000))
  call('HSET', key, 't', now, 'b', by, 'i', inc, 's', seq, 'd', digest, 'r', string.format('%.0f', here))
elseif tonumber(has[2]) < tonumber(seq) then
  call('HSET', key, 'i', inc, 's', seq, 'd', digest)
end
call('HSET', key, 'x', id, 'y', seq)
local own = call('GET', P .. 'incarnation') or ''
local function ancestor(name, upto)
  if name ~= own and tonumber(upto) > tonumber(call('HGET', P .. 'ancestors', name) or '-1') then
    call('HSET', P .. 'ancestors', name, upto)
  end
end
ancestor(inc, seq)
for i = pos + 1, #ARGV, 2 do ancestor(ARGV[i], ARGV[i + 1]) end
if here <= tonumber(seq) then
  local next = string.format('%.0f', tonumber(seq) + 1)
  local chain = redis.sha1hex((call('GET', P .. 'digest') or '') .. '\n' .. next .. '\nrestoring ' .. id)
  call('SET', P .. 'seq', next)
  call('SET', P .. 'digest', chain)
  call('XADD', P .. 'log', next .. '-0', 'e', coordinator, 'i', '', 'h', chain)
end
return { 1, coordinator }
